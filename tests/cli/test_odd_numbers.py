"""Numbers that no plan has on the command line are refused in a line, or drawn."""

import pytest
from typer.testing import CliRunner

from pykern.cli import app

LONG = "9" * 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "gpipe", "-p", LONG], "numbers must have at most 640 digits, got 5000"),
        (["plan", "gpipe", "--frozen", LONG], "numbers must have at most 640 digits, got 5000"),
        (["scale", "--gpus", LONG], "numbers must have at most 640 digits, got 5000"),
        (["plan", "gpipe", "--frozen", f"{1 << 40}"], "--frozen must name stages 0 to 3 for gpipe"),
        (["schedules", "--transfer", "1e301"], "the costs must add up to a finite number of"),
        (["schedules", "--costs", "1e301:1"], "the costs must add up to a finite number of"),
        (["verify", "--rtol", "nan"], "the value must be a number of at least 0, got 'nan'"),
        (["verify", "--atol", "-1"], "the value must be a number of at least 0, got '-1'"),
        (["fit", "--memory", "-1"], "the value must be a number of at least 0, got '-1'"),
        (["tune", "--memory", "x"], "the value must be a number, got 'x'"),
        (["tune", "--batch-size", "0"], "the value must be a whole number of at least 1, got '0'"),
        (["bench", "box", "--seconds", "0.5"], "be a number of at least 1, got '0.5'"),
        (["scale", "--straggler", "x"], "the value must be a number, got 'x'"),
        (["scale", "--jitter", ""], "the value must be a number, got ''"),
    ],
)
def test_numbers_that_no_plan_has_are_refused_in_a_line(arguments: list[str], message: str) -> None:
    """Tracebacks, and words of Python or of the command line's library without the value."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_terminal_is_told_where_it_cannot_be_wide_enough() -> None:
    """The number of columns had three hundred digits, or ended in a traceback."""
    for costs in ("1e-300:1", "1e-320:1"):
        done = CliRunner().invoke(app, ["plan", "gpipe", "--costs", costs])
        assert done.exit_code == 0
        assert "microbatches fit no terminal; --out plan.svg draws a picture" in done.stdout
