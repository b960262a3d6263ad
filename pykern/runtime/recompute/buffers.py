"""Buffers that a forward changes, such as running statistics; R must not change them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ... import _C
from ...tensors.sparse import are_equal
from ...torch_private import version_of

# The number of a module among all modules of the layers, and the name of its buffer.
Names = Sequence[tuple[int, str]]


def modules_in(layers: Sequence[object]) -> list[nn.Module]:
    """All modules in some layers, each once. Copies of layers give the same order."""
    found = (layer.modules() for layer in layers if isinstance(layer, nn.Module))
    return list({id(module): module for modules in found for module in modules}.values())


def names_in(modules: Sequence[nn.Module]) -> Names:
    """All buffers of the modules."""
    # Modules of TorchScript have names by `keys` alone.
    names = [module._buffers.keys() for module in modules]
    return [(number, name) for number, of_module in enumerate(names) for name in of_module]


def name_in(layers: Sequence[nn.Module], module: nn.Module, name: str) -> str:
    """The name of a buffer or attribute of a module in some layers of a stage, for a message."""
    for place, layer in enumerate(layers):
        for path, other in layer.named_modules():
            if other is module:
                full = f"{path}.{name}" if path else name
                return f"{full!r} of its layer {place}"
    return f"{name!r}"


def _at(buffers: Mapping[str, Tensor | None], name: str) -> Tensor | None:
    """A buffer of a module, if it has one of this name; those of TorchScript have no `get`."""
    return buffers[name] if name in buffers else None  # noqa: SIM401 - see above


class Buffers:
    """A snapshot of some buffers.

    Args:
        modules: the modules that have the buffers.
        names: of the buffers.
    """

    def __init__(self, modules: Sequence[nn.Module], names: Names) -> None:
        self._modules = modules
        self._originals = {(number, name): modules[number]._buffers[name] for number, name in names}
        unique = {id(one): one for one in self._originals.values() if one is not None}
        self._versions = {key: version_of(one) for key, one in unique.items()}
        self._copies = {key: one.detach().clone() for key, one in unique.items()}

    @property
    def is_empty(self) -> bool:
        """Whether the snapshot has no buffers."""
        return not self._originals

    def changed(self) -> Names:
        """The buffers that were replaced or written since.

        Batch normalisation writes its statistics without a new version number. Where one of them
        holds another value, all buffers of the module count, since those that hold the same value
        may have been written as well: the running mean of zeros stays 0.
        """
        found, uncounted = set(), set()
        for place, then in self._originals.items():
            now = _at(self._modules[place[0]]._buffers, place[1])
            if now is not then or (now is not None and version_of(now) != self._versions[id(now)]):
                found.add(place)
            elif now is not None and not are_equal(now, self._copies[id(now)]):
                uncounted.add(place[0])
        return [place for place in self._originals if place in found or place[0] in uncounted]

    def keep_only(self, names: Names) -> None:
        """Keeps only these buffers in the snapshot."""
        self._originals = {name: self._originals[name] for name in names}
        wanted = {id(one) for one in self._originals.values()}
        self._copies = {key: one for key, one in self._copies.items() if key in wanted}

    def lent(self) -> AbstractContextManager[object]:
        """A context in which modules have the buffers of the snapshot; restores the current ones.

        Graphs that are made within may save the snapshot's tensors, which nothing writes later.
        """
        places = [(self._modules[number]._buffers, name) for number, name in self._originals]
        now = [_at(*place) for place in places]

        def lend() -> None:
            for (buffers, name), then in zip(places, self._originals.values(), strict=True):
                buffers[name] = None if then is None else self._copies[id(then)]

        def put_back(_: BaseException | None) -> None:
            for (buffers, name), buffer in zip(places, now, strict=True):
                buffers[name] = buffer

        # A generator would add a traceback to a layer's exception, which some exceptions refuse.
        return _C.Within(lend, put_back)


class BufferVersions:
    """The buffers of some modules as they are now, to find those that are written later.

    Writes of batch normalisation's running statistics show in `num_batches_tracked` alone.

    Args:
        modules: the modules that have the buffers.
        names: of the buffers.
    """

    def __init__(self, modules: Sequence[nn.Module], names: Names) -> None:
        # Each with the dictionary that holds it, and its number of writes; those of a tensor of
        # inference mode are not counted.
        self._then: list[tuple[tuple[int, str], Mapping[str, Tensor | None], Any, int | None]] = [
            (name, buffers, now, None if now is None or now.is_inference() else now._version)
            for name in names
            for buffers in [modules[name[0]]._buffers]
            # Without a call, as `_at` would be.
            for now in [buffers[name[1]] if name[1] in buffers else None]  # noqa: SIM401
        ]

    def written(self) -> Names:
        """The buffers that were replaced or written since."""
        return [
            name
            for name, buffers, then, count in self._then
            if (count is not None and then._version != count)
            or (buffers[name[1]] if name[1] in buffers else None) is not then  # noqa: SIM401
        ]
