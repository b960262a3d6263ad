"""The allowed imports: the contracts are in pyproject.toml."""

import sysconfig
from pathlib import Path


def test_every_layer_keeps_its_contract(python):
    ran = python(Path(sysconfig.get_path("scripts")) / "lint-imports")
    assert ran.returncode == 0, ran.stdout
    assert "0 broken" in ran.stdout
