"""Finds state that stages share outside arguments and results, while the first step runs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import UntypedStorage

from ...trace import CutError
from ...trace.origins import Follow, FollowAgain, Origin, Origins, storages_of
from ...trace.reach import Place, named, places_of, shared
from ..recompute.buffers import modules_in
from ..recompute.cell import Calls
from ..stage.settings import Settings
from ..stage.stage import Stage
from .feature import Feature, Made


class _Turn(NamedTuple):
    """A stage and a microbatch, as the owner of tensors that the stage makes."""

    stage: int
    microbatch: int


# The number of settings that a watch remembers.
_NUM_KNOWN = 8

# A place, the stages that reach it, and its content.
_Held = tuple[Place, list[int], dict[Any, Any]]


class Beside(Feature):
    """Refuses state that stages pass to each other outside arguments and results.

    The feature watches all forwards of the first step, and one of each stage in the second step. It
    does so again when the caller gives a layer a setting that was not watched yet. The feature
    refuses a tensor that one stage reads and another stage has made but not handed over; a number
    in an object of several stages that changes from forward to forward; and a thread-local or
    context variable that one stage sets for another, whose thread would not see it. Checkpointing
    within a layer calls a function again in the backward: a tensor that this function reads is
    refused if another microbatch has left it in the stage since. Stages with compiled layers are
    not watched.

    Args:
        loss_fn: called by the last stage.
        origins: the record of tensors, and of the stage or recorded forward that made them.
    """

    def __init__(self, loss_fn: object, origins: Origins) -> None:
        self.origins = origins
        # The stages that write to a place, by identity of places that threads do not share.
        self.writers: dict[int, set[int]] = {}
        # Whether anything was refused, so that the next step is watched and refused again.
        self.has_refused = False
        self._loss_fn = loss_fn

    def attach(self, made: Made) -> None:
        """Starts to watch the first forwards of all stages."""
        stages, loss_fn = made.executor.stages, self._loss_fn
        reached = [places_of(modules_in(stage.layers)) for stage in stages]
        reached[-1] |= places_of(modules_in([loss_fn]), [loss_fn])
        self._shared = list(shared(reached))
        for stage in stages:
            stage.when_changed.append(_Watch(self, stage).begin)

    def refuse(self, what: str) -> None:
        """Raises CutError, with a remedy."""
        self.has_refused = True
        raise CutError(
            f"{what}. Several microbatches are in the pipeline at the same time, so the value may "
            "belong to another microbatch. Return the value from the layer and take it as an "
            "argument, keep both layers in one stage, or give each layer its own value"
        )

    def held_by(self, stage: int) -> list[_Held]:
        """The current state that a stage shares with others."""
        return [
            (place, who, dict(place.read()) if place.is_by_thread else place.values())
            for place, who in self._shared
            if stage in who
        ]


class _Watch:
    """Checks the forwards of one stage."""

    def __init__(self, beside: Beside, stage: Stage) -> None:
        self._beside = beside
        self._stage = stage
        self._follow = Follow(beside.origins, self._refuse)
        self._again = FollowAgain(beside.origins, self._refuse_again)
        # By microbatch, the storages that its F has read from earlier owners, and these owners.
        self._read: dict[int, set[tuple[int, Hashable]]] = {}
        # The wrapper of another feature, which is called first.
        self._others = stage.look
        # The settings under which the stage runs, and others under which it was watched.
        self._settings: Settings | None = None
        self._known: deque[Settings] = deque(maxlen=_NUM_KNOWN)
        # The numbers that forwards themselves change, such as a count of their calls.
        self._moving: set[tuple[int, str]] = set()
        self._num_forwards = 0
        # The step of the last forward, identified by its `finish`.
        self._step: Callable[[], object] | None = None

    def begin(self, settings: Settings) -> None:
        """Watches the stage's next actions if the caller has made settings that are new.

        Compiled layers are not watched. A watched stage takes several times as long, so settings
        that return, as when a loop freezes parameters in turn, are watched once.
        """
        before, self._settings = self._settings, settings
        if before is not None and settings.is_like(before, self._moving):
            return
        if before is not None and self._num_forwards > 0:
            self._known.append(before)
        self._num_forwards, self._step = 0, None
        is_known = any(settings.is_like(known, self._moving) for known in self._known)
        watches = not settings.compiled and (self._beside.has_refused or not is_known)
        self._stage.look = self._look if watches else self._others
        self._stage.look_back = self._look_back if watches else None

    def _look(self, microbatch: int, calls: Calls) -> Calls:
        """The calls of a microbatch, wrapped to be watched."""
        if self._others is not None:
            calls = self._others(microbatch, calls)
        finish = self._stage.finish
        if self._step is None:
            self._step = weakref.ref(finish)
        elif self._step() is not finish and not self._beside.has_refused:
            self._stage.look, self._stage.look_back = self._others, None
            self._stage.choose()
        self._follow.owner = _Turn(self._stage.index, microbatch)
        self._follow.given = set()
        self._read.setdefault(microbatch, set())
        first, *rest, end = [partial(self._call, call) for call in calls]
        held = self._beside.held_by(self._stage.index)
        return [first, *rest, partial(self._last, end, held)]

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        given = list(storages_of((arguments, _keywords(call))))
        self._follow.given |= {storage._cdata for storage in given}
        for storage in given:
            origin = self._beside.origins.of(storage)
            if origin is not None:
                self._has_read(storage, origin)
        with self._follow:
            return call(*arguments)

    def _last(self, end: Callable[..., Any], held: list[_Held], *arguments: Any) -> Any:
        found = end(*arguments)
        self._num_forwards += 1
        assert self._settings is not None
        self._moving |= self._settings.moved()
        for place, stages, before in held:
            if place.is_by_thread:
                self._require_seen(place, before)
            # The first forward may fill a cache that all others read.
            elif self._num_forwards > 1:
                self._require_same(place, stages, before)
        return found

    def _require_seen(self, place: Place, before: dict[Any, Any]) -> None:
        now = place.read()
        writers = self._beside.writers.setdefault(id(place.holder), set())
        if now.keys() != before.keys() or any(now[key] is not before[key] for key in now):
            writers.add(self._stage.index)
        elif writers - {self._stage.index}:
            self._beside.refuse(
                f"stage {min(writers)} sets {place.name}, which layers of stage "
                f"{self._stage.index} use without setting, in a thread that does not see the value"
            )

    def _require_same(self, place: Place, stages: list[int], before: dict[Any, Hashable]) -> None:
        now = place.values()
        changed = [key for key, value in before.items() if key in now and now[key] != value]
        if changed:
            who = ", ".join(map(str, stages))
            self._beside.refuse(
                f"{named(place, changed[0])}, which layers of stages {who} can read, changes from "
                "forward to forward"
            )

    @contextmanager
    def _look_back(self, microbatch: int) -> Iterator[None]:
        """A context around a backward; may nest the end of another microbatch's backward."""
        around = self._again.owner
        self._again.owner = _Turn(self._stage.index, microbatch)
        try:
            with self._again if around is None else nullcontext():
                yield
        finally:
            self._again.owner = around

    def _has_read(self, storage: UntypedStorage, origin: Origin) -> None:
        """Allows the backward of a microbatch to read a tensor that its F has read."""
        turn = self._follow.owner
        assert isinstance(turn, _Turn)
        self._read[turn.microbatch].add((storage._cdata, origin.owner))

    def _refuse_again(self, storage: UntypedStorage, origin: Origin, _: str) -> None:
        """Refuses a read of another microbatch's tensor, unless this microbatch's F has read it."""
        turn, owner = self._again.owner, origin.owner
        assert isinstance(turn, _Turn)
        if not isinstance(owner, _Turn) or owner.stage != turn.stage:
            return
        if (storage._cdata, owner) in self._read.get(turn.microbatch, ()):
            return
        self._beside.has_refused = True
        raise CutError(
            f"the backward of microbatch {turn.microbatch} in stage {turn.stage} reads a tensor "
            f"that microbatch {owner.microbatch} has left there by now ({origin.where}). Give a "
            "function that is called again in a backward, as by torch.utils.checkpoint, its "
            "inputs as arguments"
        )

    def _refuse(self, storage: UntypedStorage, origin: Origin, where: str) -> None:
        owner = origin.owner
        if isinstance(owner, _Turn) and owner.stage == self._stage.index:
            self._has_read(storage, origin)
            return
        what = f"stage {self._stage.index} reads a tensor ({where})"
        if isinstance(owner, _Turn):
            self._beside.refuse(
                f"{what} that stage {owner.stage} has made ({origin.where}) and not handed over"
            )
        self._beside.refuse(
            f"{what} that was made while the forward was recorded ({origin.where}); the tensor "
            "keeps the sample's values, because it is not an argument"
        )


def _keywords(call: object) -> list[dict[str, Any]]:
    """The keyword arguments of a call, and of the calls that it wraps."""
    if not isinstance(call, partial):
        return []
    return [call.keywords, *(found for part in call.args for found in _keywords(part))]
