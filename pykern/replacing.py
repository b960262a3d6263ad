"""Replacing a file at once, so that a reader finds the old one or the new one and never a part.

The new one is written in a folder of its own beside it, since what writes it may make files beside
it too. A writer that is killed leaves that folder behind. It held a lock on it, which ended with
the writer: that is how the next one tells a leftover from what another is writing now.
"""

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file, which when the block ends takes the place of `path` with what it holds then.

    What was at `path`, a symbolic link too, is replaced and not followed. If the block fails, all
    is as it was. When this returns, the new file survives a loss of power.

    Raises:
        OSError: the folder is not there, or cannot be written; it names `path`.
    """
    try:
        _remove_leftovers(path)
        with _own_folder(path) as folder:
            file = folder / "new"
            file.touch()
            mode = file.stat().st_mode
            yield file
            # The block may have put another file there, with another mode than the umask gives.
            file.chmod(mode)
            _sync(file)
            file.replace(path)
            _sync(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        # The user did not choose the names in the folder.
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` under a lock, which goes when the block ends."""
    lock = None
    try:
        while lock is None:
            folder = path.with_name(folder_name(path, secrets.token_hex(8)))
            folder.mkdir(mode=0o700)
            lock = _locked(folder)
        yield folder
    finally:
        if lock is not None:
            try:
                _remove(folder, lock)
            finally:
                os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    """Removes a folder and its files, as far as possible; `lock` is a descriptor of the folder.

    `shutil.rmtree` may close a descriptor twice if an interrupt arrives. The second time, the
    number may already be that of another thread's file.
    """
    with suppress(OSError):
        for name in os.listdir(lock):
            os.unlink(name, dir_fd=lock)
        folder.rmdir()


def _locked(folder: Path) -> int | None:
    """The lock on a folder, or None where another writer took it for a leftover and removed it.

    Between making a folder and locking it there is a moment in which it looks like a leftover.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def folder_name(path: Path, token: str) -> str:
    """The name of a folder for a new file at `path`: equally long for all paths."""
    name = hashlib.blake2b(os.fsencode(path.name), digest_size=8).hexdigest()
    return f".pykern-{name}.{token}.tmp"


def _sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's names, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(path: Path) -> None:
    pattern = re.compile(re.escape(folder_name(path, "*")).replace(r"\*", "[0-9a-f]{16}"))
    for entry in path.parent.iterdir():
        if pattern.fullmatch(entry.name):
            _remove_if_abandoned(entry)


def _remove_if_abandoned(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # It is gone, another user's, or not a folder.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # Its writer lives.
    else:
        _remove(folder, lock)
    finally:
        os.close(lock)
