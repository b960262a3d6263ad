"""Skip connections between layers that say what they stash and pop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from inspect import isgenerator
from itertools import count
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from ...attributes import replaced

# Tensors that are stashed and not popped yet, by namespace and name.
Skips = dict[str, Tensor | None]

_numbers = count()


class Namespace:
    """Keeps names apart that several skip connections have in common."""

    def __init__(self) -> None:
        self.number = next(_numbers)


@dataclass(frozen=True)
class stash:
    """A forward yields it to keep a tensor for a later layer."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True)
class pop:
    """A forward yields it to get a tensor that an earlier layer has kept."""

    name: str


class Skippable(nn.Module):
    """The base of modules that `skippable` has been given."""

    module_type: type[nn.Module]
    stashable_names: frozenset[str]
    poppable_names: frozenset[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_type(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Has names belong to a namespace: all that the module declares, or some."""
        names = self.stashable_names | self.poppable_names if only is None else only
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def key_of(self, name: str) -> str:
        """The name with its namespace."""
        namespace = self.namespaces.get(name)
        return name if namespace is None else f"{namespace.number}:{name}"

    def forward(self, value: Any) -> Any:
        """Runs the module's forward and answers what it yields.

        Raises:
            RuntimeError: it stashes or pops what it has not declared, or leaves out what it has.
            TypeError: it yields something else.
        """
        skips = _now.skips
        own: Skips = {}
        pending = set(self.stashable_names | self.poppable_names)
        for name in self.poppable_names - self.stashable_names:
            key = self.key_of(name)
            if key not in skips:
                raise RuntimeError(f"{name!r} must be stashed before it is popped, got a pop first")
            own[name] = skips.pop(key)
        running = self.module(value)
        output = self._answer(running, own, pending) if isgenerator(running) else running
        if pending:
            names = ", ".join(map(repr, sorted(pending)))
            raise RuntimeError(
                f"all declared names must be stashed or popped, got neither for {names}"
            )
        for name in self.stashable_names - self.poppable_names:
            skips[self.key_of(name)] = own[name]
        return output

    def _answer(self, running: Generator[Any, Any, Any], own: Skips, pending: set[str]) -> Any:
        answer: Tensor | None = None
        while True:
            try:
                asked = running.send(answer)
            except StopIteration as end:
                return end.value
            answer = None
            if isinstance(asked, stash):
                self._require(asked.name, self.stashable_names, "stashable")
                own[asked.name] = asked.tensor
            elif isinstance(asked, pop):
                self._require(asked.name, self.poppable_names, "poppable")
                if asked.name not in own:
                    raise RuntimeError(
                        f"{asked.name!r} must be popped once by a forward, got a second pop"
                    )
                answer = own.pop(asked.name)
            else:
                raise TypeError(f"a skippable forward must yield stash or pop, got {asked!r}")
            pending.discard(asked.name)

    @staticmethod
    def _require(name: str, names: frozenset[str], declared: str) -> None:
        if name not in names:
            raise RuntimeError(f"names must be declared as {declared}, got {name!r}")


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declares the names that a module's forward stashes and pops.

    The forward is a generator: it yields `stash(name, tensor)`, and `tensor = yield pop(name)`.
    """
    names = frozenset(stash), frozenset(pop)

    def decorate(module_type: type[nn.Module]) -> type[Skippable]:
        held = {
            "module_type": module_type,
            "stashable_names": names[0],
            "poppable_names": names[1],
            "__module__": module_type.__module__,
        }
        return type(module_type.__name__, (Skippable,), held)

    return decorate


class _Now(threading.local):
    """The skips of the microbatch, or plain `nn.Sequential`, that this thread runs."""

    def __init__(self) -> None:
        self.skips: Skips = {}


_now = _Now()


class Carried(NamedTuple):
    """The value between two layers while a skip is on its way.

    Attributes:
        value: of the layer before.
        skips: what later layers will pop.
    """

    value: Any
    skips: Skips


class Carries(nn.Module):
    """A layer of a chain through which skips go to where they are popped."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Any) -> Any:
        """The layer's output, with the skips that are left, if any."""
        value, skips = given if type(given) is Carried else (given, {})
        # Recompute gives the same once more.
        left = dict(skips)
        with replaced(_now, "skips", left):
            output = self.layer(value)
        return Carried(output, left) if left else output


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that every name is stashed once and then popped once in each namespace.

    Raises:
        TypeError: with all that does not match.
    """
    stashed: dict[str, str] = {}
    popped: set[str] = set()
    wrong: list[str] = []
    for where, layer in module._modules.items():
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashable_names & layer.poppable_names
        wrong += [f"{where!r} declares {name!r} as stashable and as poppable" for name in both]
        for name in sorted(layer.poppable_names - both):
            key = layer.key_of(name)
            if key not in stashed or key in popped:
                why = "popped before" if key in popped else "not stashed"
                wrong.append(f"{where!r} declares {name!r} as poppable, but it was {why}")
            popped.add(key)
        for name in sorted(layer.stashable_names - both):
            key = layer.key_of(name)
            if key in stashed:
                wrong.append(f"{where!r} declares {name!r} as stashable once more")
            stashed[key] = name
    wrong += [f"nothing pops {name!r}" for key, name in stashed.items() if key not in popped]
    if wrong:
        lines = "\n".join(f"* {line}" for line in wrong)
        raise TypeError(
            f"each stash must have one pop behind it, got\n{lines}\nIsolate names that several "
            "pairs have in common with a Namespace"
        )
