"""What peers do to each other, and how errors are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist


class PeerError(RuntimeError):
    """Another process of a group has failed, is gone, or does something else than this one."""


class SlicesLost(PeerError):
    """A process with other shards of the same stages has failed or is gone: this one cannot go on.

    Its peers in other groups do not know of that.
    """


def is_of_peers(error: BaseException | None) -> bool:
    """Whether a collective has raised it: torch has a type for that only where NCCL does."""
    if isinstance(error, PeerError):
        return False
    is_gloos = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return is_gloos or isinstance(error, dist.DistError)


def shown(error: BaseException) -> str:
    """What it is, also where it cannot say so itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


@contextmanager
def understanding(sender: str) -> Iterator[None]:
    """Around reading a message of a process of a group.

    Raises:
        PeerError: the message is something else.
    """
    try:
        yield
    except (ValueError, KeyError) as error:
        raise PeerError(
            f"{sender} of the group sent a message that is not understood here: {error}. Use one "
            "version of pykern in all processes"
        ) from error


class ErrorContext:
    """A context that leaves exceptions as they are: contextlib's assigns to what may be frozen.

    Args:
        leave: gets what was raised within it, or None; may raise something else.
        enter: called first.
    """

    def __init__(
        self,
        leave: Callable[[BaseException | None], None],
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        self._leave, self._enter = leave, enter

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)
