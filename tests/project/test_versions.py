"""The supported versions agree in all places that name them."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support import programs

STACKS = ("cpu", "torch-2.11", "torch-2.15")


@pytest.fixture(scope="module")
def rows(root):
    """Python, torch, Triton, numpy, compiler and the test of each promised stack."""
    page = (root / "docs/versions.md").read_text()
    table = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| 3.")]
    return [[cell.strip() for cell in row] for row in table]


@pytest.fixture(scope="module")
def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def test_the_stacks_of_the_table_are_those_that_are_pinned(root, rows):
    pinned = set()
    for name in STACKS:
        lines = (root / f"constraints/{name}.txt").read_text().splitlines()
        pins = dict(line.split("==") for line in lines if not line.startswith("#"))
        pinned.add((pins["torch"], pins["triton"], pins["numpy"]))
    assert {tuple(row[1:4]) for row in rows} == pinned
    assert len({tuple(row[:4]) for row in rows}) == len(rows)


def test_the_floors_of_the_package_are_the_tables(rows, project):
    (torch_,) = (
        requirement
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "torch"
    )
    oldest = min(Version(row[1]) for row in rows)
    assert str(torch_.specifier) == f">={oldest.major}.{oldest.minor}"
    pythons = {row[0] for row in rows}
    assert project["requires-python"] == f">={min(pythons, key=Version)}"
    classified = {line.rsplit(" ", 1)[1] for line in project["classifiers"] if ":: 3." in line}
    assert pythons <= classified


def test_the_readme_and_make_ask_for_what_the_table_promises(root, rows):
    oldest = min((row[0] for row in rows), key=Version)
    for name in ("README.md", "CONTRIBUTING.md", "environment/check.py"):
        assert f"Python {oldest}" in (root / name).read_text(), name
    floor = ".".join(min((row[1] for row in rows), key=Version).split(".")[:2])
    assert f"torch {floor}" in (root / "README.md").read_text()


def test_make_installs_the_site_s_extra(root, project):
    (line,) = re.findall(
        r"\.docs-tools: .*\n\t@\$\(INSTALL\) (.*)", (root / "Makefile").read_text()
    )
    assert line.replace('"', "").split() == project["optional-dependencies"]["docs"]


def test_every_test_that_the_table_names_is_there(root, rows):
    script = (root / ".ci/matrix").read_text()
    for row in rows:
        for stack in re.findall(r"\.ci/matrix ([\w.-]+)", row[5]):
            if stack.startswith("python"):
                assert stack == f"python{row[0]}"
                assert "    python*) " in script
            else:
                assert stack in {"trixie", "sid"} or (root / f"constraints/{stack}.txt").exists()
                assert stack in script


def said_under_torch_2_11(code: str) -> str:
    """The output of an interpreter that takes its torch for an older one."""
    older = "import torch; torch.__version__ = type(torch.__version__)('2.11.0')\n"
    done = programs.run(older + code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pipelining_refuses_an_older_torch():
    said = said_under_torch_2_11(
        "try: import pykern.interop.pipelining\nexcept ImportError as error: print(error)"
    )
    assert said.startswith("torch must be 2.13 or newer for pykern.interop.pipelining")
    assert "got 2.11.0" in said


def test_what_follows_torchgpipe_takes_every_torch():
    said = said_under_torch_2_11(
        "import sys, pykern.interop.fairscale, pykern.interop.torchgpipe\n"
        "print('torch.distributed.pipelining' in sys.modules)"
    )
    assert said == "False\n"
