"""Files that are either the old ones or whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a name beside `path` to write to, and moves it there once the block has succeeded.

    Raises:
        OSError: What failed on the way, said of `path`: the other name would tell nobody anything.
    """
    partial = path.with_name(f".{uuid4().hex}.part")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
