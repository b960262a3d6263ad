"""Refuses attributes and parameters that forwards of several replicas change, such as counters."""

from __future__ import annotations

from collections.abc import Sequence

from ..torch_private import version_of
from .aliases import address_of
from .recompute.buffers import modules_in, name_in
from .stage.own_attributes import AttributePlace, OwnAttributes, is_same
from .stage.stage import Run, Stage

_NUMBERS = (int, float)


class ReplicaAttributes:
    """The attributes of a stage's layers in all replicas, from the beginning of a step.

    Each replica assigns to layers of its own. An attribute has the value of the plain model only if
    the first forward of each replica assigns the same value, and later forwards leave it, as they
    leave a cache that is filled.

    Args:
        stages: the stage in each replica.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stage = stages[0]
        self._each = [_OfReplica(stage) for stage in stages]
        # Replicas have the same tensors, and all write into them.
        self._tensors = [
            (place, value, version_of(value)) for place, value in self._each[0].before.tensors()
        ]

    def watched(self, replica: int, run: Run) -> Run:
        """The function of F in a replica, which notes what its first forward has assigned."""
        of_replica = self._each[replica]
        arguments = of_replica.stage.arguments

        def forward(microbatch: int) -> None:
            has_rows = arguments[microbatch] is not None
            run(microbatch)
            if not has_rows:
                return
            if of_replica.first is None:
                of_replica.first = OwnAttributes(of_replica.modules)
            else:
                of_replica.forward_again = True
            of_replica.look_at_parameters()

        return forward

    @property
    def are_complete(self) -> bool:
        """Whether each replica has run a forward."""
        return all([one.first is not None for one in self._each])

    def refuse(self) -> None:
        """Raises RuntimeError if forwards of the step assigned an attribute in no fixed order."""
        ran = [one for one in self._each if one.first is not None]
        # The first replica runs the layers themselves.
        if ran in ([], self._each[:1]):
            return
        for place in dict.fromkeys(place for one in ran for place in one.changed()):
            if not _is_one_value(place, ran):
                self._raise("assigns the attribute", place)
        for place, tensor, version in self._tensors:
            if version_of(tensor) != version:
                self._raise("writes into the attribute", place)
        for one in ran:
            if one.written is not None:
                self._raise("writes the parameter", one.written)

    def _raise(self, does: str, place: AttributePlace) -> None:
        number, name = place
        layers = self._stage.originals
        raise RuntimeError(
            f"stage {self._stage.index} {does} "
            f"{name_in(layers, modules_in(layers)[number], name)}, which replicas "
            "would do in no fixed order. Use a schedule and a pipeline without replicas"
        )


class _OfReplica:
    """The attributes of a stage in one replica.

    Attributes:
        before: as the step began.
        first: as the first forward has left them.
        forward_again: whether there was another one.
        written: a parameter that a forward has written, or has given other memory; None without.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.modules = modules_in(stage.layers)
        self.before = OwnAttributes(self.modules)
        self.first: OwnAttributes | None = None
        self.forward_again = False
        self.written: AttributePlace | None = None
        self._parameters = [
            ((number, name), parameter, version_of(parameter), address_of(parameter))
            for number, module in enumerate(self.modules)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def look_at_parameters(self) -> None:
        """Finds what a forward that ends has written. Updates come after a stage's forwards."""
        for place, parameter, version, address in self._parameters:
            if version_of(parameter) != version or address_of(parameter) != address:
                self.written = place

    def changed(self) -> list[AttributePlace]:
        """The attributes that any forward has assigned."""
        assert self.first is not None
        return [*self.before.changed(), *self.first.changed()]


def _is_one_value(place: AttributePlace, ran: Sequence[_OfReplica]) -> bool:
    """Whether an attribute has one value, after each replica's first forward and after its last."""
    values = [one.before.now(place) for one in ran]
    values += [one.first.then(place) for one in ran if one.first is not None]
    if not all(is_same(values[0], value) for value in values):
        return False
    # If each replica runs one forward, a number that all have changed alike may be a count.
    return any(one.forward_again for one in ran) or type(ran[0].before.then(place)) not in _NUMBERS
