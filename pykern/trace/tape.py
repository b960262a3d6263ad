"""A tape: what the forward of a model does with tensors, as a list of instructions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..once import once
from ..tensors.trees import flatten
from .call_modes import Modes, under
from .errors import CutError, ReplayError
from .objects import HandedIn
from .state import described
from .values import PLAIN, Build, Held, Here, Ref, builder, held_in, key_of, refs_in

# Arguments by name, of a call that has none.
_NONE: dict[str, Any] = {}
# The lists of a tensor's values are no deeper, as tensors have at most so many dimensions.
_DEPTH = 64


@dataclass(eq=False)
class Instruction:
    """One call of a function, or of a module that stays whole.

    Attributes:
        target: the function, or the module's name in the model.
        arguments: of the call, (args, kwargs), with what stands for values in them.
        results: for each tensor in what the call returns, in order, its number.
        written: (before, after) numbers of the values that the call writes and does not return.
        modes: to be entered for the call; None for those around the whole forward.
        where: the line of the model that made the call.
        rest: what else it returned (`rest_of`); None for a tensor alone.
        overwritten: numbers, before it, of all values that the call writes.
        shapes: of the results that the forward has looked at, by number.
        carried: what it finds in objects that it is given; None where it is not given any.
    """

    target: Callable[..., Any] | str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: list[int]
    written: list[tuple[int, int]]
    modes: Modes | None
    where: str
    rest: Any = None
    overwritten: Sequence[int] = ()
    shapes: dict[int, torch.Size] = field(default_factory=dict)
    carried: HandedIn | None = None

    def __post_init__(self) -> None:
        args, kwargs = self.arguments
        self._key = key_of(self.target) if isinstance(self.target, str) else None
        # In a tuple: before 2.13, torch's compiler takes a function that is an attribute for a
        # method, and breaks its graph.
        self._called: tuple[Any] = (self.target,)
        self._args: Build = builder(args)
        self._kwargs: Build | None = builder(kwargs) if kwargs else None
        if self.carried is not None:
            self._args = _with_objects(self._args, self.carried)

    @once
    def reads(self) -> list[int]:
        """Numbers of the values that the call is given."""
        return refs_in((self.arguments, self._parts))

    @once
    def makes(self) -> list[int]:
        """Numbers of the values that there are only after it."""
        # A call may return what it is given.
        given = set(self.reads)
        made = [number for number in self.results if number not in given]
        return [*made, *(after for _, after in self.written)]

    @once
    def held(self) -> list[Held]:
        """Parameters and buffers that the call is given."""
        return held_in((self.arguments, self._parts))

    @property
    def _parts(self) -> list[Any]:
        return [] if self.carried is None else self.carried.parts

    @property
    def simple(self) -> tuple[Any, ...]:
        """The key, the target, the numbers of one or two values and the result; None for others."""
        args, kwargs = self.arguments
        numbers = [arg.number for arg in args if isinstance(arg, Ref)]
        fits = len(numbers) == len(args) in (1, 2) and len(self.results) == 1
        others = [self.modes, self.rest, self.carried]
        if not fits or kwargs or self.written or self.shapes or others != [None] * 3:
            return (None,) * 5
        return self._key, self.target, numbers[0], (*numbers, None)[1], self.results[0]

    @property
    def anchor(self) -> str | None:
        """The name in a cut of a module, or of a function that is given parameters; else None."""
        if isinstance(self.target, str):
            return self.target
        return next((held.name for held in self.held if held.is_parameter), None)

    def run(self, here: Here, modules: Mapping[str, Any]) -> None:
        """Makes the call, and takes what it makes into the values.

        Args:
            here: where its arguments are.
            modules: the calls of those that stay whole, by key.
        """
        function: Any = self._called[0] if self._key is None else modules[self._key]
        args = self._args(here)
        kwargs = _NONE if self._kwargs is None else self._kwargs(here)
        if self.modes is None:
            returned = function(*args, **kwargs)
        else:
            with under(self.modes):
                returned = function(*args, **kwargs)
        is_one = isinstance(returned, Tensor) and len(self.results) == 1 and self.rest is None
        if is_one and not (self.written or self.shapes):
            here.values[self.results[0]] = returned
        else:
            self.take(returned, here.values)

    def take(self, returned: Any, values: dict[int, Any]) -> None:
        """Takes what the call has returned and written into the values."""
        if self.rest is None and isinstance(returned, Tensor) and len(self.results) == 1:
            values[self.results[0]] = returned
        elif self.results:
            leaves, _ = flatten(returned)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._require_same(leaves, len(tensors))
            values.update(zip(self.results, tensors, strict=True))
        for before, after in self.written:
            values[after] = values[before]
        for number, shape in self.shapes.items():
            if values[number].shape != shape:
                raise ReplayError(
                    f"{self.name} returned a tensor of shape {tuple(values[number].shape)}, and "
                    f"{tuple(shape)} when the forward of the model was recorded, which looked at "
                    "it. Let the module around it stay whole (whole=[...])"
                )

    def _require_same(self, leaves: Sequence[Any], num_tensors: int) -> None:
        rest = rest_of(leaves)
        if num_tensors != len(self.results) or not _alike(rest, self.rest):
            raise ReplayError(
                f"{self.name} returned something else than when the forward of the model was "
                f"recorded ({num_tensors} tensors and {rest}, then {len(self.results)} and "
                f"{self.rest}). Let the module around it stay whole (whole=[...])"
            )

    @property
    def name(self) -> str:
        """For a message."""
        if isinstance(self.target, str):
            return self.target
        return f"{getattr(self.target, '__name__', self.target)} ({self.where})"


@dataclass(eq=False)
class Read:
    """A read of a tensor's values by the forward, to decide what it does.

    Attributes:
        function: that reads.
        arguments: of its call.
        found: what it returned.
        steps: the instructions that its arguments come from; they depend on inputs, parameters
            and buffers alone.
        where: the line of the model that reads.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    found: Any
    steps: Sequence[Instruction]
    where: str

    @once
    def held(self) -> list[Held]:
        """Parameters and buffers that it depends on."""
        return [*held_in(self.arguments), *(held for step in self.steps for held in step.held)]

    def require_constant(self, written: Collection[str]) -> None:
        """Raises CutError where it depends on what the forward writes, by the names of that."""
        for held in self.held:
            if held.name in written:
                raise CutError(
                    f"{self.where} reads the value of {held.name}, to go on in Python, and the "
                    "forward writes into it: the result depends on the microbatches before. Do it "
                    "within a module that stays whole, or with torch's functions"
                )

    def holds(
        self,
        values: Mapping[int, Any],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> bool:
        """Whether it would find the same with these inputs, and what the model has by key."""
        here = Here(dict(values), parameters, buffers, None)
        with torch.no_grad():
            for step in self.steps:
                step.run(here, {})
            args, kwargs = (builder(part)(here) for part in self.arguments)
            return _equal(self.function(*args, **kwargs), self.found)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that passes from a module to a later one beside what they return and are given.

    Attributes:
        maker, reader: numbers of the instructions that call the two.
        text: says which modules and lines.
    """

    maker: int
    reader: int
    text: str


@dataclass(eq=False)
class Tape:
    """A forward.

    Attributes:
        instructions: in the order of their calls.
        output: what the forward returned, with what stands for values in it.
        reads: of the values of its inputs. The tape is for those with which all hold.
        aliases: by number of a value that is about to be written, others in the same memory.
        trained: numbers of the inputs that get a gradient.
        crossings: tensors that pass between modules which stay whole, unseen.
        in_buffers: names of the buffers that the forward writes, by the values in their memory.
        with_gradients: whether there is a backward.
    """

    instructions: list[Instruction]
    output: Any
    reads: list[Read]
    aliases: dict[int, set[int]]
    trained: frozenset[int]
    crossings: list[Crossing]
    in_buffers: dict[int, str]
    with_gradients: bool


def _with_objects(args: Build, carried: HandedIn) -> Build:
    def make(here: Here) -> Any:
        here.objects = carried.objects(here)
        return args(here)

    return make


def rest_of(leaves: Sequence[Any]) -> list[Any]:
    """The leaves of a result without its tensors. Objects, which may hold tensors, become types."""
    return [
        None
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, PLAIN) or hasattr(leaf, "__array__")
        else type(leaf)
        for leaf in leaves
    ]


def _alike(now: Sequence[Any], then: Any) -> bool:
    return len(now) == len(then) and all(map(_equal, now, then))


def _equal(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    # Objects of which nothing is known are taken to be what they were.
    is_known = isinstance(one, (*PLAIN, tuple, list, dict, set)) or hasattr(one, "__array__")
    return not is_known or described(one, _DEPTH) == described(other, _DEPTH)
