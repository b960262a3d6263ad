"""The command line in this process: what it prints, and what it refuses in one line."""

import inspect
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import pykern
from pykern.cli import app
from pykern.plan import (
    Action,
    Costs,
    Kind,
    Memory,
    Plan,
    load_plan,
    load_plan_and_costs,
    save_plan,
    with_recompute,
    with_replicas,
)
from pykern.schedules import by_name


def pykern_(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100"} | environment)


def test_without_arguments_it_names_five_next_steps() -> None:
    result = pykern_()
    assert result.exit_code == 0
    assert len(re.findall(r"^  pykern ", result.stdout, re.MULTILINE)) == 5


def test_every_next_step_names_a_command_that_exists() -> None:
    for command in re.findall(r"^  pykern (\w+)", pykern_().stdout, re.MULTILINE):
        assert pykern_(command, "--help").exit_code == 0


def test_the_version_is_the_package_s() -> None:
    result = pykern_("--version")
    assert result.exit_code == 0
    found = re.fullmatch(
        r"pykern (\S+) \(core by (.+), (?:not )?optimised, with(?:out)? NVTX\)\n", result.stdout
    )
    assert found is not None
    assert found.groups() == (pykern.__version__, pykern._C.compiler)


def test_the_version_tells_how_the_core_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pykern._C, "optimised", False)
    monkeypatch.setattr(pykern._C, "nvtx_built", False)
    assert pykern_("--version").stdout.endswith(", not optimised, without NVTX)\n")


@pytest.mark.parametrize(
    "command",
    [(), *((name,) for name in ("demo", "plan", "schedules", "scale", "verify", "profile"))],
)
def test_every_help_has_one_example(command: tuple[str, ...]) -> None:
    result = pykern_(*command, "--help")
    assert result.exit_code == 0
    assert result.stdout.count("Example: pykern") == 1


def test_help_names_every_schedule() -> None:
    assert all(name in pykern_("plan", "--help").stdout for name in by_name)


@pytest.mark.parametrize("name", by_name)
def test_every_schedule_of_the_catalogue_is_drawn(name: str) -> None:
    result = pykern_("plan", name, "-p", "2", "-m", "4")
    assert result.exit_code == 0
    assert result.stdout.startswith(name)
    assert [line[:10] for line in result.stdout.splitlines()[1:3]] == ["device 0 |", "device 1 |"]


def test_a_plan_comes_with_its_measures() -> None:
    # 1F1B: makespan (m + p - 1) (F + B), bubble (p - 1) / (m + p - 1), peak p - d.
    out = pykern_("plan", "one_f_one_b", "-p", "4", "-m", "8", "--costs", "1:2").stdout
    assert f"makespan {(8 + 3) * 3} ms, bubble ratio {3 / 11:.3f}" in out
    assert " ".join(out.splitlines()[-2:]).endswith("from device 0 on: 4 3 2 1")


def test_a_device_s_share_costs_the_same_however_many_chunks_it_has() -> None:
    for chunks in ("1", "2", "4"):
        out = pykern_("plan", "interleaved", "-p", "1", "-m", "8", "--chunks", chunks).stdout
        assert "makespan 24 ms, bubble ratio 0.000" in out


def test_auto_searches_and_says_how_good_it_is() -> None:
    out = pykern_("plan", "auto", "--memory", "0.75", "--budget", "5").stdout
    assert out.startswith("auto, ")
    assert "memory 0.75x of at most 0.75x" in out
    assert "time as v_half" in out or "less time than v_half" in out
    # Costs and latency are the command line's.
    slow = pykern_("plan", "auto", "--costs", "2:2:2", "--transfer", "1", "--budget", "1").stdout
    bound = re.search(r"lower bound ([\d.]+) ms", slow)
    assert bound is not None
    assert float(bound[1]) >= 8 * 6 + 3 * 1.5


def test_transfers_take_their_time() -> None:
    out = pykern_("plan", "gpipe", "-p", "2", "-m", "1", "--transfer", "0.5").stdout
    assert "makespan 7 ms" in out


def test_waves_make_the_bubble_smaller() -> None:
    ratios = []
    for waves in ("1", "2", "4"):
        out = pykern_("plan", "hanayo", "-p", "4", "-m", "4", "--waves", waves).stdout
        ratios.append(float(re.findall(r"bubble ratio ([\d.]+)", out)[0]))
    assert ratios[0] > ratios[1] > ratios[2]


@pytest.mark.parametrize("columns", ["1", "30", "200"])
def test_a_drawing_fits_any_terminal(columns: str) -> None:
    result = pykern_("plan", "hanayo", "-p", "2", "-m", "2", COLUMNS=columns)
    assert result.exit_code == 0
    assert "device 1" in result.stdout or columns == "1"
    assert max(len(line) for line in result.stdout.splitlines()) <= int(columns)


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.SVG", b"<svg"), ("a.txt", b"device 0 |")],
)
def test_the_file_is_what_its_name_says(tmp_path: Path, name: str, start: bytes) -> None:
    out = tmp_path / name
    result = pykern_("plan", "gpipe", "--out", str(out))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"written: {out}"
    assert out.read_bytes().startswith(start)


def test_the_trace_holds_every_action(tmp_path: Path) -> None:
    out = tmp_path / "a.trace.json"
    pykern_("plan", "gpipe", "-p", "2", "-m", "3", "--out", str(out))
    names = [e["name"] for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    assert sorted(names) == sorted(f"{s}{k}{m}" for s in range(2) for k in "FB" for m in range(3))


def test_the_table_holds_every_action(tmp_path: Path) -> None:
    out = tmp_path / "a.txt"
    pykern_("plan", "hanayo", "-p", "2", "-m", "2", "--out", str(out))
    assert out.read_text() == f"{by_name['hanayo'](2, 2)}\n"


def test_halves_of_a_backward_have_times_of_their_own() -> None:
    # A device alone: every microbatch takes F + I + W.
    out = pykern_("plan", "gpipe", "-p", "1", "-m", "4", "--costs", "1:2:3").stdout
    assert "makespan 24 ms" in out


def test_every_option_of_every_schedule_is_a_flag() -> None:
    shown = pykern_("plan", "--help").stdout
    for name, schedule in by_name.items():
        for option in list(inspect.signature(schedule).parameters)[2:]:
            assert f"--{option.removeprefix('num_')} " in shown, (name, option)


@pytest.mark.parametrize("suffix", ["json", "csv", "comms.csv"])
def test_a_saved_plan_is_drawn_again(suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"plan.{suffix}"
    made = pykern_("plan", "hanayo", "-p", "2", "-m", "4", "--waves", "2", "--out", str(out))
    assert load_plan(out) == by_name["hanayo"](2, 4, waves=2)
    again = pykern_("plan", str(out))
    assert again.exit_code == 0
    assert again.stdout.splitlines()[0].startswith(f"plan.{suffix}, 8 stages, 4 microbatches")
    assert again.stdout.splitlines()[1:] == made.stdout.splitlines()[1:-1]


def test_a_file_s_own_costs_hold_unless_others_are_given(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(by_name["gpipe"](2, 1), path, costs=Costs(5e6, 10e6))
    assert "makespan 30 ms" in pykern_("plan", str(path)).stdout
    assert "makespan 6 ms" in pykern_("plan", str(path), "--costs", "1:2").stdout
    copy = tmp_path / "copy.json"
    assert pykern_("plan", str(path), "--out", str(copy)).exit_code == 0
    assert load_plan_and_costs(copy) == load_plan_and_costs(path)
    compared = pykern_("plan", "gpipe", "--compare", str(path))
    assert (compared.exit_code, compared.stdout) == (2, "")
    assert (
        "--costs must be given to compare with a file that has costs of its own, got"
        in compared.stderr
    )


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    result = pykern_("plan", "gpipe", "-p", "1", "-m", "1")
    assert result.stdout.startswith("gpipe, 1 stage, 1 microbatch  makespan 3 ms")


def test_two_are_compared_on_one_time_axis(tmp_path: Path) -> None:
    out = tmp_path / "both.svg"
    arguments = ("one_f_one_b", "-p", "2", "-m", "4", "--compare", "hanayo", "--waves", "2")
    result = pykern_("plan", *arguments, "--out", str(out))
    lines = result.stdout.splitlines()
    assert lines[0].startswith("one_f_one_b, 2 stages, 4 microbatches  makespan 15 ms")
    assert lines[3].startswith("hanayo, 8 stages, 4 microbatches  makespan ")
    text = " ".join(result.stdout.split())
    assert "one_f_one_b, 2 stages, 4 microbatches: peak memory," in text
    assert "hanayo, 8 stages, 4 microbatches: peak memory," in text
    picture = out.read_text()
    assert "one_f_one_b, 2 stages" in picture
    assert "hanayo, 8 stages" in picture


def test_two_files_of_the_same_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, schedule in (("old", "gpipe"), ("new", "one_f_one_b")):
        (tmp_path / folder).mkdir()
        save_plan(by_name[schedule](2, 4), f"{folder}/plan.json")
    lines = pykern_("plan", "old/plan.json", "--compare", "new/plan.json").stdout.splitlines()
    assert lines[0].startswith("old/plan.json, 2 stages")
    assert lines[3].startswith("new/plan.json, 2 stages")


def test_replicas_stand_side_by_side_and_are_kept_in_files(tmp_path: Path) -> None:
    out, one = tmp_path / "both.json", tmp_path / "one.json"
    made = pykern_("plan", "one_f_one_b", "--replicas", "2", "-m", "7", "--out", str(out)).stdout
    # Stages twice as long as those of four devices, and half of the warm-up.
    assert made.startswith("one_f_one_b, 2 stages, 7 microbatches, 2 replicas  makespan 30 ms")
    plan = with_replicas(by_name["one_f_one_b"](2, 4), 2, 7)
    assert load_plan(out) == plan
    assert pykern_("plan", str(out)).stdout.startswith("both.json, 2 stages, 7 microbatches  make")
    save_plan(by_name["one_f_one_b"](2, 4), one)
    again = pykern_("plan", str(one), "--replicas", "2", "-m", "7").stdout
    assert again.splitlines()[1:] == made.splitlines()[1:-1]
    assert "8 microbatches, 2 replicas" in pykern_("plan", str(one), "--replicas", "2").stdout
    found = pykern_("plan", "auto", "--replicas", "2", "--budget", "1").stdout
    # The search has the costs of what it draws.
    drawn, said = re.findall(r"^.*makespan ([0-9.]+) ms", found, re.M)
    assert drawn == said


def test_memory_is_told_for_both_rules_where_the_backward_is_split(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text("0F0,0I0,0F1,0I1,0W0,0W1\n")
    out = pykern_("plan", str(path)).stdout
    assert " ".join(out.split()).endswith("from device 0 on: 2 if W frees, 1 if I frees")


def test_recompute_stands_beside_the_plan_without() -> None:
    def drawn(*arguments: str) -> str:
        return " ".join(pykern_("plan", "one_f_one_b", "--recompute", *arguments).stdout.split())

    without = "without recompute: makespan 33 ms, bubble ratio 0.273, peak memory 4 3 2 1"
    assert "makespan 38 ms, bubble ratio 0.211" in drawn("all")
    assert drawn("all").endswith(f"from device 0 on: 2 2 2 1 {without}")
    assert drawn("all", "--memory", "1").endswith(f"from device 0 on: 4 3 2 1 {without}")
    assert drawn("0,2", "--memory", "0.25").endswith(f"from device 0 on: 1 3 1 1 {without}")
    assert "R.. recompute" in drawn("0")
    assert "R.. recompute" not in drawn("3")


def test_a_plan_with_recompute_is_kept_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    pykern_("plan", "gpipe", "--recompute", "all", "--memory", "0.5", "--out", str(out))
    plan = load_plan(out)
    assert plan == with_recompute(
        by_name["gpipe"](4, 8), cells_of(by_name["gpipe"](4, 8)), Costs(1, 2), Memory(1), 2
    )
    result = pykern_("plan", str(out), "--recompute", "1")
    assert result.stderr == "pykern: cells must be new to the plan, got 1R0\n"
    both = pykern_("plan", "gpipe", "--compare", "hanayo", "--recompute", "0").stdout
    assert len(re.findall("without recompute: makespan 33 ms", " ".join(both.split()))) == 2


def cells_of(plan: Plan) -> list[Action]:
    numbers = range(plan.num_microbatches)
    return [Action(Kind.R, s, m) for s in range(plan.num_stages) for m in numbers]


def test_frozen_stages_have_forwards_alone_or_hand_gradients_on(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    shown = " ".join(
        pykern_("plan", "one_f_one_b", "--frozen", "0,1", "--out", str(out)).stdout.split()
    )
    assert load_plan(out) == by_name["one_f_one_b"](4, 8).with_frozen([0, 1])
    assert "makespan 29 ms" in shown
    assert "from device 0 on: 1 1 2 1" in shown
    for wrong, message in (
        ("all", "stages must leave one to train, got all 4"),
        ("4", "--frozen must name stages 0 to 3 for zb_h1, 4 stages, 8 microbatches, got stage 4"),
    ):
        refused = pykern_("plan", "zb_h1", "--frozen", wrong)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"pykern: {message}")


def test_the_table_has_a_line_for_every_schedule() -> None:
    lines = pykern_("schedules", "-p", "4", "-m", "8", "--costs", "1:1:1").stdout.splitlines()
    found = {line.split()[0].removesuffix(":"): line.split()[1:] for line in lines if line}
    assert by_name.keys() <= found.keys()
    assert found["one_f_one_b"] == ["4", "33", "0.273", "0.273", "4", "4", "6"]
    assert found["gpipe"] == ["4", "33", "0.273", "0.273", "8", "8", "6"]
    assert found["hanayo"][-1] == "12"  # the turn is not a message


REFUSED = [
    (["frob"], "No such command 'frob'."),
    (["plan"], "Missing argument 'NAME|FILE'."),
    (["plan", "gpipe", "--memory", "1"], "--memory must go with auto and --recompute, got gpipe"),
    (["plan", "auto", "--memory", "0"], "the value must be a number above 0, got '0'"),
    (["plan", "auto", "--memory", "0.1"], "memory must be at least 1 / num_devices = 0.25, which"),
    (["plan", "auto", "--waves", "2"], "--waves must go with hanayo, got auto"),
    (["plan", "gpipe", "--recompute", "0,x"], "be all, or different stages such as 0,2, got '0,x'"),
    (["plan", "gpipe", "--recompute", "1,1"], "be all, or different stages such as 0,2, got '1,1'"),
    (["plan", "gpipe", "--recompute", ""], "must be all, or different stages such as 0,2, got ''"),
    (["plan", "gpipe", "--recompute", "4"], "3 for gpipe, 4 stages, 8 microbatches, got stage 4"),
    (["plan", "gpipe", "--recompute", "0", "--budget", "5"], "must go with auto, got gpipe"),
    (["plan", "forward_only", "--recompute", "0"], "plan must have backwards to recompute"),
    (["plan", "seq1f1b", "--recompute", "0"], "whole microbatches to be recomputed, got 2 slices"),
    (["plan", "gpipe", "--recompute", "0", "--out", "a.csv"], "got 0R0 at position 8 of device 0"),
    (["plan", "gpipe", "--frob"], "No such option: --frob"),
    (["plan", "2bw"], "schedule must be one of 'breadth_first', 'chimera',"),
    (["plan", "gpipe", "-p", "x"], "the value must be a whole number of at least 1, got 'x'"),
    (["plan", "gpipe", "-m", "0"], "the value must be a whole number of at least 1, got '0'"),
    (["plan", "gpipe", "-m", "1.5"], "the value must be a whole number of at least 1, got '1.5'"),
    (["plan", "gpipe", "-p", "9" * 30], "got " + "9" * 30),
    (["plan", "gpipe", "--waves", "2"], "--waves must go with hanayo, got gpipe"),
    (["plan", "hanayo", "--chunks", "2"], "interleaved_zb, gis, forward_only, got hanayo"),
    (["plan", "hanayo", "--waves", "0"], "the value must be a whole number of at least 1, got '0'"),
    (["plan", "gpipe", "--costs", "1:nan"], "times F:B or three F:I:W of at least 0, got '1:nan'"),
    (["plan", "gpipe", "--costs", "1"], "be two times F:B or three F:I:W of at least 0, got '1'"),
    (["plan", "gpipe", "--costs", "1:1:1:1"], "F:B or three F:I:W of at least 0, got '1:1:1:1'"),
    (["schedules", "--costs", "1:-1"], "be two times F:B or three F:I:W of at least 0, got '1:-1'"),
    (["plan", "gpipe", "--compare", "gpipe"], "--compare must be another plan, got gpipe twice"),
    (["plan", "gpipe", "--compare", "2bw"], "got '2bw'. Did you mean 'pipedream_2bw'?"),
    (
        ["plan", "gpipe", "--compare", "hanayo", "--chunks", "2"],
        "forward_only, got other schedules",
    ),
    (["plan", "plan.json", "--waves", "2"], "plan.json: No such file or directory"),
    (["plan", "small.csv", "--waves", "2"], "--waves must go with hanayo, got small.csv"),
    (["plan", "small.csv", "-p", "3"], "--devices must be 2, as in the plan in small.csv, got 3"),
    (
        ["plan", "gpipe", "-m", "4", "--compare", "small.csv"],
        "1, as in the plan in small.csv, got 4",
    ),
    (["plan", "small.csv", "--replicas", "2", "-p", "2"], "be 2 for each of 2 replicas, as in"),
    (["plan", "small.csv", "--replicas", "2", "-m", "4"], "must be 1 for each of 2 replicas, as"),
    (["plan", "gpipe", "--replicas", "3"], "devices must be a multiple of replicas, 3, got 4"),
    (["plan", "gpipe", "--replicas", "4", "-m", "3"], "must be at least replicas, 4, got 3"),
    (["plan", "gpipe", "--replicas", "0"], "value must be a whole number of at least 1, got '0'"),
    (["plan", "pipedream", "--replicas", "2"], "must have neither REDUCE nor U to be replicated"),
    (["plan", "wrong.csv"], "wrong.csv: line 1, cell 2: a cell must be like"),
    (["plan", "gpipe", "--compare", "hanayo", "--out", "a.json"], "drawing beside --compare, got"),
    (["plan", "gpipe", "--transfer", "-1"], "the value must be a time of at least 0, got '-1'"),
    (["plan", "gpipe", "--out", "plan.gif"], ".json, .comms.csv, .csv, .txt, .png, .pdf, .svg"),
    (["plan", "gpipe", "--out", "folder.svg"], "must be a file in a folder that exists, got"),
    (["plan", "gpipe", "--out", "folder.txt"], "must be a file in a folder that exists, got"),
    (
        ["plan", "gpipe", "--out", "absent/plan.png"],
        "--out must be a file in a folder that exists, got",
    ),
    (["demo", "--steps", "0"], "the value must be a whole number of at least 1, got '0'"),
    (["demo", "--steps", "many"], "the value must be a whole number of at least 1, got 'many'"),
    (["demo", "--microbatches", "-2"], "the value must be a whole number of at least 1, got '-2'"),
    (["demo", "--schedule", "zb"], "got 'zb'. Did you mean 'zb_h1'?"),
    (["demo", "--schedule", "gpipe", "--waves", "2"], "--waves must go with hanayo, got gpipe"),
    (["demo", "--schedule", "pipedream"], "must not update weights within a step, got U actions"),
    (["demo", "--schedule", "seq1f1b"], "the plan must have whole microbatches, got 2 slices"),
    (["demo", "--schedule", "forward_only"], "--schedule must have backwards, got 'forward_only'"),
    (["profile", "--schedule", "forward_only"], "backwards, got 'forward_only'. A profile is of"),
    (["demo", "--devices", "gpu:4"], "device 'gpu:4' is unknown"),
    (["demo", "--devices", "cpu:0"], "cpu:0"),
    (["demo", "--data", "absent.txt"], "absent.txt: No such file or directory"),
    (["demo", "--data", "."], "path must be a text file, got ., which is a directory"),
    (["demo", "--data", "/dev/zero"], "got /dev/zero, which is not a regular file"),
    (["demo", "--data", "empty.txt"], "empty.txt must have at least 2064 bytes of text, got 0"),
    (["demo", "--data", "binary.txt"], "got binary.txt, which is binary (byte 0 at offset 3)"),
    (["demo", "--out", "empty.txt"], "--out must be a folder, got the file empty.txt"),
    (["demo", "--out", "empty.txt/out"], "empty.txt/out: Not a directory"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda value: " ".join(value)[:40])
def test_what_cannot_be_used_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("folder.svg", "folder.txt"):
        (tmp_path / folder).mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"abc\0" * 10_000)
    (tmp_path / "small.csv").write_text("0F0,0B0\n1F0,1B0\n")
    (tmp_path / "wrong.csv").write_text("0F0,what")
    before = sorted(tmp_path.iterdir())
    result = pykern_(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"pykern: .+\n", result.stderr)
    assert message in result.stderr
    assert sorted(tmp_path.iterdir()) == before
