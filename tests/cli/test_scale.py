"""`pykern scale`: the table it prints, and what it refuses."""

import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from pykern.cli import app
from pykern.scale import DGX_A100, DGX_H100, DGX_H200, Job, Layout, Transformer, predict

TINY = ("--layers", "8", "--width", "512", "--sequence", "128", "--batch", "64")


def scale(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("scale", *arguments), env={"COLUMNS": "200"})


def test_the_best_layouts_stand_under_their_number_of_gpus() -> None:
    result = scale(*TINY, "--gpus", "8..32,12", "--top", "2")
    assert result.exit_code == 0
    heading, *lines = result.stdout.splitlines()
    assert heading.split()[:4] == ["GPUs", "dp", "x", "tp"]
    assert [line.split()[0] for line in lines[:6]] == ["8", "8", "16", "16", "32", "32"]
    assert "Predicted from data sheets by simulation, not measured." in lines[6]
    assert lines[-1] == "12 GPUs: no layout divides batch, layers and boxes and fits"
    alone = scale("--gpus", "1").stdout
    assert alone.endswith("1 GPU: no layout divides batch, layers and boxes and fits\n")


def test_a_row_is_a_prediction() -> None:
    sizes = ("--layers", "8", "--width", "8192", "--sequence", "2048", "--batch", "32")
    one = scale(*sizes, "--gpus", "16", "--zero1", "--gpu", "h200", "--schedule", "gpipe")
    row = one.stdout.splitlines()[1].split()
    layout = Layout(*map(int, row[1].rstrip("*").split("x")))
    job = Job(Transformer(8, 8192, 2048, 32_000), 32, zero=1)
    found = predict(job, DGX_H200, layout, "gpipe")
    assert row[2:4] == ["gpipe", f"{found.step_ns / 1e6:,.0f}"]
    assert row[-1] == f"{found.memory_bytes / 1e9:,.0f}"


def test_layers_that_are_computed_again_take_time_and_save_memory() -> None:
    arguments = (*TINY, "--gpus", "8", "--top", "1", "--schedule", "gpipe", "--gpu", "a100")
    rows = [
        scale(*arguments, "--recompute", how).stdout.splitlines()[1].split()
        for how in ("none", "layer")
    ]
    layout = Layout(*map(int, rows[1][1].split("x")))
    job = Job(Transformer(8, 512, 128, 32_000), 64, recompute="layer")
    found = predict(job, DGX_A100, layout, "gpipe")
    assert rows[1][4] == f"{found.flops_ratio:.1%}"
    assert found.flops_ratio < float(rows[0][4].rstrip("%")) / 100


def test_boxes_have_as_many_cards_as_told() -> None:
    arguments = (*TINY, "--gpus", "64", "--top", "1", "--schedule", "gpipe")
    assert scale(*arguments, "--cards", "8").stdout == scale(*arguments).stdout
    shown = scale(*arguments, "--cards", "1").stdout.splitlines()[1].split()
    layout = Layout(*map(int, shown[1].rstrip("*").split("x")))
    job = Job(Transformer(8, 512, 128, 32_000), 64)
    found = predict(job, replace(DGX_H100, cards=1), layout, "gpipe")
    assert shown[7] == f"{found.reduction_ns / 1e6:,.0f}"
    assert found.reduction_ns > 2 * predict(job, DGX_H100, layout, "gpipe").reduction_ns


def test_a_narrow_terminal_shows_all_of_a_layout() -> None:
    arguments = ("scale", *TINY, "--gpus", "1024", "--batch", "1024", "--top", "1")
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    first = next(line for line in result.stdout.splitlines() if line.startswith("1024"))
    assert len(first.split()) == 10
    assert "…" not in result.stdout


def test_a_straggler_has_a_line_for_each_row() -> None:
    result = scale(*TINY, "--gpus", "8", "--top", "2", "--straggler", "1.2")
    *_, one, other = result.stdout.splitlines()
    for line in (one, other):
        assert line.startswith("8 GPUs, ")
        assert "one GPU 1.2 times as slow: step +" in line
    refused = scale(*TINY, "--gpus", "8", "--straggler", "0.9")
    assert refused.exit_code == 2
    assert "slowdown must be 1 or more, got 0.9" in refused.stderr


def test_times_that_vary_have_a_line_for_each_row() -> None:
    result = scale(*TINY, "--gpus", "16", "--top", "2", "--jitter", "0.1")
    *_, one, other = result.stdout.splitlines()
    for line in (one, other):
        assert re.fullmatch(
            r"16 GPUs, \S+, \w+, times that vary by 10%: step \+\d+\.\d% on average, "
            r"\+\d+\.\d% at the 95th percentile; GPUs wait \S+ to \S+ ms for their peers",
            line,
        )
    refused = scale(*TINY, "--gpus", "8", "--jitter", "11")
    assert refused.exit_code == 2
    assert "variation must be 0 to 10, got 11" in refused.stderr


def test_pipelines_over_boxes_are_marked() -> None:
    sizes = ("--layers", "64", "--width", "12288", "--sequence", "2048", "--batch", "64")
    shown = scale(*sizes, "--gpus", "64", "--schedule", "one_f_one_b").stdout
    assert "*" in shown.splitlines()[1]
    assert "* a pipeline over several boxes" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--gpus", "eight"),
            "the numbers must be 1 to 65536 such as 8,64 or 8..1024, got 'eight'",
        ),
        (("--gpus", "0"), "the numbers must be 1 to 65536 such as 8,64 or 8..1024, got '0'"),
        (
            ("--gpus", "8..99999999"),
            "the numbers must be 1 to 65536 such as 8,64 or 8..1024, got '",
        ),
        (("--gpus", "8..4"), "a range must be of ascending numbers, got 8..4. Write 4..8."),
        (("--gpus", "16,8..4"), "a range must be of ascending numbers, got 8..4. Write 4..8."),
        (("--gpus", ""), "the numbers must be 1 to 65536 such as 8,64 or 8..1024, got ''"),
        (
            ("--gpus", "8,,16"),
            "the numbers must be 1 to 65536 such as 8,64 or 8..1024, got '8,,16'",
        ),
        (("--schedule", ""), "names must be different ones with commas between them, got ''."),
        (("--schedule", "gpipe,gpipe"), "got 'gpipe,gpipe'. Give each schedule once."),
        (("--schedule", "gpipe,"), "got 'gpipe,'. Give each schedule once."),
        (("--gpu", "abacus"), "GPU must be one of 'a100', 'h100' or 'h200', got 'abacus'"),
        (("--schedule", "chimera"), "schedule must be one that is predicted, got 'chimera'"),
        (
            ("--recompute", "all"),
            "recompute must be one of 'none', 'scores' or 'layer', got 'all'",
        ),
        (("--cards", "9"), "cards must be 1 to 8, the GPUs of a box, got 9"),
        (("--layers", "0"), "the value must be a whole number of at least 1, got '0'"),
    ],
)
def test_bad_values_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = scale(*TINY, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
