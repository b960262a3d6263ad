"""Ranks in one process: threads that take turns, each told what torchrun would tell its process.

A rank runs until it meets the others, in a step or a barrier, or returns; then the next one runs.
So the ranks' own code never runs at once, and each finds torch's random numbers as it left them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ...modes import random_states, set_states

Brought = TypeVar("Brought")
# The work of the rank that arrives last, for all: from what each brought to what each gets.
Act = Callable[[Sequence[Brought]], Sequence[Any]]


class World:
    """The ranks of one program, of which one has the turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._turn = 0
        self._returned: set[int] = set()
        self._brought: dict[int, Any] = {}
        # For each rank that has not been there to take it: what it gets, and what it raises.
        self._outcomes: dict[int, tuple[Any, BaseException | None]] = {}

    def meet(self, rank: int, brought: Any, act: Act[Any]) -> Any:
        """The result of `act` for this rank; the rank that arrives last calls it for all.

        Raises:
            RuntimeError: a rank has returned, and will not come.
            BaseException: what `act` has raised, the same object in every rank.
        """
        self._brought[rank] = brought
        if len(self._brought) == self.size:
            self._act(act)
        self._pass_on(rank)
        if rank in self._brought:
            del self._brought[rank]
            gone = ", ".join(map(str, sorted(self._returned)))
            raise RuntimeError(
                f"rank {rank} waits for all others, but rank {gone} has returned. Have every rank "
                "call the same steps and barriers"
            )
        outcome, error = self._outcomes.pop(rank)
        if error is not None:
            raise error
        return outcome

    def _act(self, act: Act[Any]) -> None:
        everything = [self._brought.pop(rank) for rank in range(self.size)]
        try:
            self._outcomes = {rank: (each, None) for rank, each in enumerate(act(everything))}
        except BaseException as error:
            self._outcomes = dict.fromkeys(range(self.size), (None, error))

    def begin(self, rank: int) -> None:
        """Waits for the first turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)

    def leave(self, rank: int) -> None:
        """Ends the last turn."""
        with self._changed:
            self._returned.add(rank)
            if self._turn == rank:
                self._advance(rank)

    def _pass_on(self, rank: int) -> None:
        if self.size == 1:
            return
        restore = _random_state()
        with self._changed:
            self._advance(rank)
            self._changed.wait_for(lambda: self._turn == rank)
        restore()

    def _advance(self, rank: int) -> None:
        others = [(rank + step) % self.size for step in range(1, self.size + 1)]
        self._turn = next((other for other in others if other not in self._returned), -1)
        self._changed.notify_all()


class _Here(threading.local):
    """Which rank this thread is; a thread that `run` has not started is the only one."""

    def __init__(self) -> None:
        self.world = World(1)
        self.rank = 0


_here = _Here()


def run(main: Callable[..., Any], nproc: int, *args: Any) -> list[Any]:
    """Calls `main(*args)` once for every rank, in the place of `torchrun --nproc-per-node`.

    The ranks are threads that take turns; the last is the calling one. Steps of a schedule use all
    devices at once. Every rank begins with the caller's random state of torch, and has its own
    from then on; those of Python and NumPy are common to all.

    Args:
        main: what each process would run.
        nproc: how many ranks, at least 1.
        *args: for `main`.

    Returns:
        Results of `main`, by rank.

    Raises:
        ValueError: there is no rank to run.
        RuntimeError: called by a rank.
        BaseException: the first that a rank has raised.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if _here.world.size > 1:
        raise RuntimeError(
            f"run must be called outside of ranks, got a call by rank {_here.rank}. Ranks cannot "
            "start ranks of their own"
        )
    world, restore = World(nproc), _random_state()
    results: list[Any] = [None] * nproc
    errors: list[BaseException] = []

    def be(rank: int) -> None:
        before = _here.world, _here.rank
        _here.world, _here.rank = world, rank
        try:
            world.begin(rank)
            restore()
            results[rank] = main(*args)
        except BaseException as error:
            errors.append(error)
        finally:
            world.leave(rank)
            _here.world, _here.rank = before

    threads = [
        threading.Thread(target=be, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(nproc - 1)
    ]
    for thread in threads:
        thread.start()
    # An interrupt reaches the main thread, which is the one that runs steps.
    be(nproc - 1)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def meet(brought: Brought, act: Act[Brought]) -> Any:
    """The result of `act` for this rank, once all ranks have come: see `World.meet`."""
    return _here.world.meet(_here.rank, brought, act)


def barrier() -> None:
    """Returns when all ranks have come."""
    meet(None, _nothing_for_each)


def get_rank() -> int:
    """The rank of the caller; 0 outside `run`."""
    return _here.rank


def get_world_size() -> int:
    """How many ranks there are; 1 outside `run`."""
    return _here.world.size


def is_initialized() -> bool:
    """True: there is nothing to set up."""
    return True


def init_process_group(*_: Any, **__: Any) -> None:
    """Does nothing, whatever torch.distributed's would be told: ranks need no set-up."""


def destroy_process_group() -> None:
    """Does nothing."""


def _nothing_for_each(brought: Sequence[object]) -> list[None]:
    if any(item is not None for item in brought):
        raise RuntimeError(
            "all ranks must be in one barrier or one step, got some in a barrier and others in a "
            "step. Call both in the same order in every rank"
        )
    return [None] * len(brought)


def _random_state() -> Callable[[], None]:
    """A function that puts torch's default generators back into their state now."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    gpus = [torch.device("cuda", gpu) for gpu in range(count)]
    return partial(set_states, random_states(gpus))
