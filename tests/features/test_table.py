"""The README shows the table that these tests make."""

import runpy
from pathlib import Path


def test_the_readme_has_the_table(root: Path) -> None:
    made = runpy.run_path(str(root / "docs/make_features.py"))["made"]()
    assert made == (root / "README.md").read_text(), "run python docs/make_features.py"
    assert made.count("| `test_") == 46
