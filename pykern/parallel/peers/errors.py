"""Errors that come from peers, and how errors are told to peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist


class PeerError(RuntimeError):
    """Another process of a group has failed, is gone, or does not do the same as this process."""


class SlicesLost(PeerError):
    """A process with other shards of the same stages has failed or is gone, so this one must stop.

    This process's peers in other groups do not know about the failure.
    """


def is_of_peers(error: BaseException | None) -> bool:
    """Whether a collective raised the error; torch has an error type for NCCL's errors only."""
    if isinstance(error, PeerError):
        return False
    is_gloos = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return is_gloos or isinstance(error, dist.DistError)


def shown(error: BaseException) -> str:
    """The type and the message of an error; the type alone if the message itself raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


@contextmanager
def understanding(sender: str) -> Iterator[None]:
    """The context around reading a message from a process of a group.

    Raises:
        PeerError: the message does not have the expected form.
    """
    try:
        yield
    except (ValueError, KeyError) as error:
        raise PeerError(
            f"{sender} of the group sent a message that is not understood here: {error}. Use one "
            "version of pykern in all processes"
        ) from error


class ErrorContext:
    """A context that leaves exceptions unchanged; contextlib's assigns to them, even if frozen.

    Args:
        leave: gets the exception raised within the context, or None; may raise another exception.
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
