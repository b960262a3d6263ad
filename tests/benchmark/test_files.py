"""BoxResults are read back as they were written, refused when they are another's, and compared."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pykern.benchmark import BoxResults, Comparison, Figure, compare, load
from pykern.benchmark.figures import FORMAT
from pykern.benchmark.report import as_markdown, picture_of_boxes
from pykern.cli import app
from pykern.plan.drawing.shapes import Bars

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
        ("{", "box.json must be a file of pykern bench box, got another file: the text must be"),
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
    assert "0.455   FASTER" in printed
    assert "only here" not in printed


def test_a_page_has_a_column_for_each_box() -> None:
    boxes = [("old", results(ONE)), ("new", results(Figure("a | b", "us", (2.0, 4.0)), ONE))]
    lines = as_markdown(boxes).splitlines()
    assert lines[:3] == [
        "- **old**: cores 2",
        "  - inference left out: the time was over",
        "- **new**: cores 2",
    ]
    assert lines[5:] == [
        "| figure | unit | old | new |",
        "| --- | --- | --- | --- |",
        "| a step | ms | 1.100 (1.040 to 1.160), predicted 0.900 "
        "| 1.100 (1.040 to 1.160), predicted 0.900 |",
        "| a / b | us |  | 3.000 (2.400 to 3.600) |",
    ]


def test_bars_of_a_unit_are_in_proportion() -> None:
    slow = Figure("a slow step", "ms", (4.4, 4.4))
    picture = picture_of_boxes([("old", results(ONE)), ("new", results(slow, ONE))])
    bars = [part.rectangles[0] for part in picture.parts if isinstance(part, Bars)]
    widths = [width for _, _, width, _ in bars]
    # Two of the legend, then of the step of both with a mark each, then the slow one's.
    assert widths[2:] == pytest.approx([444 / 4, 2, 444 / 4, 2, 444])
    marks = [left for left, _, width, _ in bars if width == 2]
    assert marks == pytest.approx([330 + 444 / 4 * 0.9 / 1.1 - 1] * 2)


def test_a_page_is_printed_and_drawn(tmp_path: Path) -> None:
    for name in ("old", "new"):
        results(ONE).save(tmp_path / f"{name}.json")
    paths = [str(tmp_path / f"{name}.json") for name in ("old", "new")]
    done = CliRunner().invoke(
        app, ["bench", "report", *paths, "--picture", str(tmp_path / "bars.svg")]
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == as_markdown([("old", results(ONE)), ("new", results(ONE))])
    assert "a step" in (tmp_path / "bars.svg").read_text()
    for wrong in ([paths[0], paths[0]], [*paths * 4], [str(tmp_path / "none.json")]):
        assert CliRunner().invoke(app, ["bench", "report", *wrong]).exit_code == 2
