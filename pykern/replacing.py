"""Replacing a file atomically: a reader finds the old file or the new one, never a part.

The new file is written in a folder of its own beside the old one, since the writing library may
make files beside its file. A killed writer leaves its folder behind. A writer locks its folder, and
the lock ends with the writer: so the next writer can tell a leftover from a folder in use. Where a
file system has no locks, leftovers stay.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_DEVICES = Path("/dev")
# Some file systems of networks and clusters cannot lock, or cannot sync a folder.
_NOT_THERE = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def require_folder(name: str, path: Path) -> None:
    """Refuses a file that cannot be made, before there is something to lose.

    Args:
        name: the argument that names the file.
        path: the file.

    Raises:
        ValueError: it is a folder, or its folder does not exist or may not be written to.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"{name} must be a file in a folder that exists, got {path}. Name a file, and make its "
            "folder first"
        )
    if _is_stream(path):
        return
    try:
        # Rights tell root nothing of a file system that is read-only or not on a disk.
        with _own_folder(path):
            pass
    except OSError as error:
        raise ValueError(
            f"{name} must be a file in a folder that may be written to, got {path}: "
            f"{error.strerror}. Choose another folder"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file for the block to fill, which replaces `path` when the block ends.

    A symbolic link at `path` is replaced, not followed. If the block fails, the old file is
    unchanged. When the block has ended, the new file survives a loss of power. A device or a pipe,
    such as `/dev/stdout`, is never replaced: the file's bytes are written into it.

    Raises:
        OSError: the folder does not exist, or cannot be written; the error names `path`.
    """
    try:
        if _is_stream(path):
            with TemporaryDirectory() as elsewhere:
                file = Path(elsewhere, "new")
                file.touch()
                yield file
                with file.open("rb") as new, path.open("ab") as stream:
                    shutil.copyfileobj(new, stream)
            return
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


def _is_stream(path: Path) -> bool:
    """Whether a path leads to a device or a pipe, or is the name of an open file.

    The file is looked at once: another writer may put the first one there at any moment.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISREG(mode):
        # As /dev/stdout, /dev/fd/3 and /proc/self/fd/3.
        folders = (_DEVICES, Path(f"/proc/{os.getpid()}/fd"))
        return path.is_symlink() and path.absolute().parent.resolve() in folders
    return not stat.S_ISDIR(mode)


@contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    """A locked folder beside `path`, which is removed when the block ends."""
    lock, folder = None, path
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
    """The lock on a folder, or None if another writer took it for a leftover and removed it.

    For a moment, between being made and being locked, a folder looks like a leftover.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with _where_possible():
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


@contextmanager
def _where_possible() -> Iterator[None]:
    """A context for an operation that the file system may not have."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise


def folder_name(path: Path, token: str) -> str:
    """The name of a folder for a new file at `path`; the length is the same for all paths."""
    name = hashlib.blake2b(os.fsencode(path.name), digest_size=8).hexdigest()
    return f".pykern-{name}.{token}.tmp"


def _sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's names, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with _where_possible():
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
        return  # The folder is gone, belongs to another user, or is not a folder.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # The folder's writer is alive, or nobody can tell.
    else:
        _remove(folder, lock)
    finally:
        os.close(lock)
