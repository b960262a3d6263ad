"""BoxResults are read back as they were written, refused when they are another's, and compared."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pykern.benchmark import BoxResults, Comparison, Figure, compare, load
from pykern.benchmark.figures import FORMAT
from pykern.cli import app

ONE = Figure("a step", "ms", (1.0, 1.1, 1.2), 0.9)


def results(*figures: Figure) -> BoxResults:
    return BoxResults({"cores": "2"}, figures, {"inference": "the time was over"})


def test_a_file_is_read_back(tmp_path: Path) -> None:
    before = results(ONE, Figure("a copy", "ms", (2.0, 3.0)))
    before.save(tmp_path / "box.json")
    assert load(tmp_path / "box.json") == before


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "box.json must be a file of pykern bench box, got another file"),
        ("[]", "got another file"),
        (
            results(ONE).text().replace(FORMAT, "other"),
            "format must be .*, got 'other'",
        ),
        (results(ONE).text().replace('"samples"', '"times"'), "samples"),
        (results(ONE).text().replace("1.1", "-1"), "must be two or more times above 0"),
        (results(ONE).text().replace("1.1", "NaN"), "got another file"),
        (json.dumps(json.loads(results(ONE).text()) | {"figures": 3}), "figures"),
    ],
)
def test_other_files_are_refused_in_a_line(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "box.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rule):
        load(path)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((0.5, 0.6, 0.7), "FASTER"),
        ((2.0, 2.1, 2.2), "SLOWER"),
        ((1.0, 1.11, 1.2), "SAME"),
        ((0.9, 1.15, 1.3), "AMBIGUOUS"),
    ],
)
def test_a_difference_is_claimed_where_the_middles_are_apart(
    after: tuple[float, ...], verdict: str
) -> None:
    (found,) = compare(results(ONE), results(Figure("a step", "ms", after)))
    assert found == Comparison("a step", "ms", 1.1, sorted(after)[1], verdict)  # type: ignore[arg-type]


def test_the_command_compares_what_both_have(tmp_path: Path) -> None:
    results(ONE, Figure("only here", "ms", (1.0, 1.0))).save(tmp_path / "a.json")
    BoxResults({"cores": "4"}, (Figure("a step", "ms", (0.5, 0.5)),), {}).save(tmp_path / "b.json")
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    printed = CliRunner().invoke(app, ["bench", "compare", *files]).stdout
    assert "cores: 2 | 4" in printed
    assert "0.455 │ FASTER" in printed
    assert "only here" not in printed
