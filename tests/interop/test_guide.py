"""The examples of the guide run, and print what it shows."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "from-torchrun-pipelining.md"
SCRIPTS = Path(__file__).parent / "scripts"


def test_the_guides_code_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = GUIDE.read_text()
    code = "".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    shown = "".join(re.findall(r"^```text\n(.*?)^```", page, re.M | re.S))
    exec(code, {"__name__": "guide"})
    assert capsys.readouterr().out == shown


def test_the_lines_that_change_are_those_of_the_scripts() -> None:
    (shown,) = re.findall(r"^```diff\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    for sign, name in (("-", "before.py"), ("+", "after.py")):
        lines = [line[1:] for line in shown.splitlines() if line.startswith(sign)]
        assert len(lines) == 3
        assert set(lines) <= set((SCRIPTS / name).read_text().splitlines())
