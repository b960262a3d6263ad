"""A file is replaced at once: whoever is killed, whatever fails, old or new is there and whole."""

import errno
import fcntl
import importlib
import itertools
import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pykern import checkpoint
from pykern.checkpoint import CheckpointError
from pykern.replacing import folder_name, replacing, require_folder
from tests.interrupts import Interrupt
from tests.support.full_disk import full_disk


@pytest.fixture
def file(tmp_path) -> Path:
    file = tmp_path / "run.ckpt"
    file.write_text("old")
    return file


def left(file: Path, name: str = "0123456789abcdef") -> Path:
    """The files that a killed writer leaves behind."""
    folder = file.with_name(folder_name(file, name))
    folder.mkdir()
    (folder / "new").write_text("half")
    return folder


def names(file: Path) -> list[str]:
    return sorted(each.name for each in file.parent.iterdir())


def test_the_new_file_is_there_when_the_block_ends(file):
    with replacing(file) as new:
        new.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert names(file) == ["run.ckpt"]


def test_an_interrupt_at_any_line_comes_as_it_is(tmp_path, monkeypatch):
    """As it is: no descriptor is closed twice, the second time maybe another thread's file."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and not what is looked at

    def save(file: Path) -> None:
        with replacing(file) as new:
            new.write_text("new")

    for line in itertools.count():
        file = tmp_path / str(line) / "run.ckpt"
        file.parent.mkdir()
        file.write_text("old")
        with Interrupt(line) as interrupt:
            try:  # noqa: SIM105 - lines of `suppress` are interrupted as well
                save(file)
            except KeyboardInterrupt:
                pass
        if not interrupt.where:
            break
        assert file.read_text() in ("old", "new"), interrupt.where
        file.write_text("old")
        save(file)
        assert file.read_text() == "new", interrupt.where
    assert line > 20


def test_a_block_that_fails_leaves_the_old_one(file):
    def interrupted() -> None:
        with replacing(file) as new:
            new.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_text() == "old"
    assert names(file) == ["run.ckpt"]


def test_bytes_and_names_are_synced_before_and_after_the_switch(file, monkeypatch):
    done = []
    sync, rename = os.fsync, os.replace
    inode = {}

    def noted_sync(handle: int) -> None:
        sync(handle)
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        inode[kind] = os.fstat(handle).st_ino
        done.append(f"sync {kind}")

    def noted_rename(old: Path, new: Path) -> None:
        rename(old, new)
        done.append("switch")

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_rename)
    checkpoint.save(file, nn.Linear(1, 1))
    assert done == ["sync file", "switch", "sync folder"]
    assert inode == {"file": file.stat().st_ino, "folder": file.parent.stat().st_ino}


def test_the_mode_is_what_the_umask_leaves(file):
    before = os.umask(0o027)
    try:
        checkpoint.save(file, nn.Linear(1, 1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_link_is_replaced_and_not_followed(file):
    link = file.with_name("latest")
    link.symlink_to(file)
    with replacing(link) as new:
        new.write_text("new")
    assert not link.is_symlink()
    assert (file.read_text(), link.read_text()) == ("old", "new")


def test_a_pipe_is_written_into_and_stays(tmp_path):
    """As root a file took the place of /dev/null, and another user was refused /dev/stdout."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(pipe) as new:
            new.write_text("new")
        assert os.read(reader, 9) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_an_open_file_is_written_by_its_number(file, folder):
    """As of `pykern topo --json /dev/fd/3 3>box.json`: a folder was to be made there."""
    with file.open("a") as opened:
        path = Path(folder, str(opened.fileno()))
        require_folder("--json", path)
        with replacing(path) as new:
            new.write_text("new")
    assert file.read_text() == "oldnew"
    assert names(file) == ["run.ckpt"]


def test_what_killed_writers_left_is_removed_by_the_next(file):
    left(file)
    left(file, "f" * 16)
    checkpoint.save(file, nn.Linear(1, 1))
    assert names(file) == ["run.ckpt"]


def test_what_another_writes_now_is_left_alone(file):
    folder = left(file)
    with replacing(file) as ours, replacing(file) as theirs:
        ours.write_text("ours")
        theirs.write_text("theirs")
        assert len(names(file)) == 3
    assert not folder.exists()
    assert file.read_text() == "ours"
    assert names(file) == ["run.ckpt"]


@pytest.mark.parametrize("call", ["flock", "fsync"])
@pytest.mark.parametrize("number", ["EINVAL", "ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_a_file_system_need_not_lock_or_sync(file, monkeypatch, call, number):
    """As Lustre without `-o flock`: nothing could be saved. Leftovers of killed writers stay."""
    folder = left(file)

    def refuse(*_: Any) -> None:
        raise OSError(getattr(errno, number), "as mounted")

    monkeypatch.setattr(fcntl if call == "flock" else os, call, refuse)
    with replacing(file) as new:
        new.write_text("new")
    assert file.read_text() == "new"
    assert names(file) == ([folder.name] if call == "flock" else []) + ["run.ckpt"]


def test_a_disk_that_does_not_take_the_bytes_is_an_error(file, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken") as caught, replacing(file) as new:
        new.write_text("new")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(file))
    assert file.read_text() == "old"


def test_nothing_else_is_removed(file):
    of_other = folder_name(file.with_name("other"), "0123456789abcdef")
    for name in (".run.ckpt.tmp", folder_name(file, "0123"), of_other):
        file.with_name(name).mkdir()
    file.with_name(folder_name(file, "a" * 16)).write_text("a file of that name")
    target = file.with_name("precious")
    target.mkdir()
    (target / "new").write_text("kept")
    file.with_name(folder_name(file, "b" * 16)).symlink_to(target)
    before = names(file)
    checkpoint.save(file, nn.Linear(1, 1))
    assert names(file) == before
    assert (target / "new").read_text() == "kept"


def test_a_folder_is_no_place_for_a_file(file):
    with pytest.raises(
        CheckpointError, match=r"path must be a file, got the folder .*. Name a file in it"
    ):
        checkpoint.save(file.parent, nn.Linear(1, 1))
    nowhere = file.parent / "none" / "run.ckpt"
    with pytest.raises(FileNotFoundError) as caught:
        checkpoint.save(nowhere, nn.Linear(1, 1))
    assert caught.value.filename == str(nowhere)


def test_a_disk_that_is_full_leaves_the_old_one(file):
    model = nn.Linear(1, 1)
    checkpoint.save(file, model, extra="old")
    with full_disk(500), pytest.raises(OSError, match="File too large") as caught:
        checkpoint.save(file, model, extra="new")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(file))
    assert checkpoint.load(file, model) == "old"
    assert names(file) == ["run.ckpt"]


def test_the_longest_name_that_a_folder_takes_can_be_saved(tmp_path):
    for name in ("n" * 255, "é" * 127):
        file = tmp_path / name
        checkpoint.save(file, nn.Linear(1, 1), extra=1)
        assert checkpoint.load(file, nn.Linear(1, 1)) == 1
    too_long = tmp_path / ("n" * 256)
    with pytest.raises(OSError, match="File name too long") as caught:
        checkpoint.save(too_long, nn.Linear(1, 1))
    assert (caught.value.errno, caught.value.filename) == (errno.ENAMETOOLONG, str(too_long))


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_folder_removed_before_it_is_locked_is_made_again(file, monkeypatch, call):
    """Another writer begins in the moment when a new folder looks like a leftover."""
    module = os if call == "open" else fcntl
    original = getattr(module, call)
    others = iter([True])

    def late(*arguments: Any, **options: Any) -> Any:
        if next(others, False):
            with replacing(file) as theirs:
                theirs.write_text("theirs")
        return original(*arguments, **options)

    monkeypatch.setattr(module, call, late)
    with replacing(file) as ours:
        assert file.read_text() == "theirs"
        ours.write_text("ours")
    assert file.read_text() == "ours"
    assert names(file) == ["run.ckpt"]


def expect_saved_at_once(file: Path, count: int) -> None:
    """Each of eight threads replaces one file over and over, and reads it back whole."""

    def write(number: int) -> None:
        for turn in range(count):
            content = f"{number} {turn}\n" * 100
            with replacing(file) as new:
                new.write_text(content)
            found = file.read_text()
            assert found == found.splitlines(keepends=True)[0] * 100

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert names(file) == [file.name]


def test_saves_to_one_path_at_once_do_not_disturb_each_other(file):
    expect_saved_at_once(file, 25)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_many_saves_to_one_path_at_once_do_not_disturb_each_other(file):
    expect_saved_at_once(file, 1000)


def test_without_safetensors_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "pykern.checkpoint.file")
    with pytest.raises(ImportError, match=r"pip install 'pykern-runtime\[checkpoint\]'"):
        importlib.import_module("pykern.checkpoint.file")


def kill_writers(folder: Path, *counts: int) -> dict[str, int]:
    """Its counts say how often which file was found, and how many writers left something."""
    # Newer Pythons warn of forks where numpy has threads, which here do nothing.
    warnings = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
    program = (*warnings, "-m", "tests.checkpoint.killed_writers")
    ran = subprocess.run(
        [sys.executable, *program, str(folder), *map(str, counts)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    result = json.loads(ran.stdout)
    assert result["files"] == ["run.ckpt"]
    print(result["seen"])
    return result["seen"]


@pytest.mark.forks
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new(tmp_path):
    seen = kill_writers(tmp_path, 9, 4, 6)
    assert seen["call: old"] > 2
    assert seen["call: new"] > 0
    assert seen["byte: old"] == 4
    assert seen["left behind"] > 4


@pytest.mark.nightly
@pytest.mark.forks
@pytest.mark.timeout(1200)
def test_writers_killed_at_every_call_and_at_many_times(tmp_path):
    seen = kill_writers(tmp_path, 1, 40, 200)
    assert sum(count for name, count in seen.items() if name.startswith("time")) == 200
    assert seen["time: new"] > 20
