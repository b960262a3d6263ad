"""The installed command in a process of its own: exit codes, signals, terminals and imports."""

import json
import os
import pty
import signal
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from pykern.boxes import RateBySize, load, save

PYKERN = str(Path(sysconfig.get_path("scripts")) / "pykern")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYKERN, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
        timeout=50,
    )


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """The text that a terminal receives."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [PYKERN, *arguments], stdout=theirs, env=os.environ | {"TERM": "xterm"} | environment
    ) as process:
        os.close(theirs)
        received = b""
        while chunk := read_or_end(ours):
            received += chunk
    os.close(ours)
    assert process.returncode == 0
    return received.decode()


def read_or_end(terminal: int) -> bytes:
    """Linux says that a terminal has no writer left by an error."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def test_success_is_zero_and_a_bad_value_is_two_without_a_traceback() -> None:
    good, bad = run("plan", "gpipe"), run("plan", "gpipe", "-p", "0")
    assert (good.returncode, good.stderr) == (0, "")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == (
        "pykern: Invalid value for '-p' / '--devices': the value must be a whole number of at "
        "least 1, got '0'\n"
    )


def test_a_terminal_without_a_size_is_not_a_width() -> None:
    assert run("plan", "gpipe", COLUMNS="0").stdout == run("plan", "gpipe", COLUMNS="80").stdout


def test_the_demo_refuses_before_it_starts() -> None:
    bad = run("demo", "--devices", "cuda")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("pykern: devices must be CPU workers, since torch")
    assert bad.stderr.count("\n") == 1


def test_a_reader_that_stops_early_sees_no_traceback() -> None:
    command = f"{PYKERN} plan gpipe -p 500 -m 20 | head -1"
    piped = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert piped.stdout.startswith("gpipe")
    assert piped.stderr == ""


@pytest.mark.parametrize("command", ["plan gpipe", "schedules -p 2 -m 2", "topo --box h100x8"])
def test_output_that_cannot_be_written_is_told_in_a_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        arguments = [PYKERN, *command.split()]
        done = subprocess.run(
            arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "pykern: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_files_are_written_though_nobody_reads_the_tables(tmp_path: Path, closed: str) -> None:
    """Without a stdout, Python's has no `isatty`, and a file is opened by the number of stdout."""
    command = f"{PYKERN} topo --box h100x8 --json {tmp_path}/box.json {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "box.json").read_text())["version"]


def test_a_folder_that_has_been_removed_is_told_in_a_line(tmp_path: Path) -> None:
    """The line had the system's words alone, and none of the folder."""
    command = f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && {PYKERN} "
    for arguments in ("fit none:make", "tune none:make"):
        run_there = subprocess.run(
            command + arguments, shell=True, capture_output=True, text=True, check=False
        )
        assert (run_there.returncode, run_there.stdout) == (2, "")
        assert run_there.stderr == (
            "pykern: none must be looked for in a folder that exists, got a current folder that "
            "has been removed. Go to another folder\n"
        )


def test_tables_are_printed_though_a_file_cannot_be_written() -> None:
    bad = run("topo", "--box", "h100x8", "--json", "/dev/full")
    assert (bad.returncode, bad.stderr) == (2, "pykern: /dev/full: No space left on device\n")
    assert bad.stdout.startswith("box: 8 x H100")


def test_a_pipe_that_knows_ascii_only_is_enough() -> None:
    assert run("plan", "--help", PYTHONIOENCODING="ascii").returncode == 0


def test_colours_are_for_terminals_that_want_them() -> None:
    assert "\x1b[" not in run("plan", "gpipe").stdout
    assert "\x1b[38;" in on_a_terminal("plan", "gpipe", COLORTERM="truecolor")
    assert "\x1b[38;" not in on_a_terminal("plan", "gpipe", COLORTERM="truecolor", NO_COLOR="1")


def test_words_in_brackets_reach_a_terminal(tmp_path: Path) -> None:
    """Rich took them for styles, so a rate seemed to be that of one direction alone."""
    box = load("h100x8")
    sizes = (RateBySize(4096, 2.0, 1.0),)
    links = (replace(box.links[0], by_size=sizes),)
    save(replace(box, name="the [old] box", links=links), tmp_path / "box.json")
    told = on_a_terminal("topo", "--box", str(tmp_path / "box.json"), COLUMNS="120")
    assert "the [old] box" in told
    assert "4 KiB 2 [1] GB/s [while both send]" in told


def test_importing_the_command_line_is_light() -> None:
    heavy = "{'torch', 'matplotlib', 'numpy', 'triton'}"
    code = f"import sys, pykern.cli; sys.exit(', '.join({heavy} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_quietly(tmp_path: Path) -> None:
    arguments = [PYKERN, "demo", "--out", str(tmp_path)]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("step"):
                break
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=30)
    assert (demo.returncode, errors) == (130, "")
