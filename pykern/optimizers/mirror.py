"""Mirrors: copies of a stage's parameters on the host, with the transfers there and back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..runtime.host_memory import HostLink, UntilCopied

_HALVES = (torch.float16, torch.bfloat16)


class Mirror:
    """A parameter's copy on the host.

    Args:
        parameter: a dense parameter of a stage.
        link: the host link of the stage.

    Attributes:
        parameter: the given parameter.
        master: the values that are stepped; in float32 if the parameter has half precision.
    """

    def __init__(self, parameter: nn.Parameter, link: HostLink) -> None:
        self.parameter = parameter
        self._link = link
        self.is_half = parameter.dtype in _HALVES
        dtype = torch.float32 if self.is_half else parameter.dtype
        self.master = nn.Parameter(link.buffer(parameter, dtype))
        # The buffer for transfers between the two, of the parameter's type.
        self._wire = self.master.detach()
        if self.is_half:
            self._wire = link.buffer(parameter, parameter.dtype)
            # NaN is equal to no value, so that at first all values are taken.
            self.master.detach().fill_(torch.nan)
        self._landing: Tensor | None = None
        # The gradient that `_landing` was read from, and the gradient's version then.
        self._read: tuple[weakref.ref[Tensor], int] | None = None
        # The parameter's version and address when it had the master's values.
        self._state: tuple[int, int] | None = None

    def read(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The source and the target of the copy that brings the gradient to the host."""
        if self._landing is None or self._landing.dtype != gradient.dtype:
            self._landing = self._link.buffer(self.parameter, gradient.dtype)
        self._read = weakref.ref(gradient), gradient._version
        return gradient.detach(), self._landing

    def has_read(self, gradient: Tensor) -> bool:
        """Whether this gradient was the last one read, and torch has counted no write since."""
        if self._read is None:
            return False
        reference, version = self._read
        return reference() is gradient and version == gradient._version

    def take_gradient(self) -> None:
        """Gives the master the gradient that has arrived, if the parameter has a gradient."""
        if self.parameter.grad is None:
            self.master.grad = None
        else:
            assert self._landing is not None
            self.master.grad = self._landing.to(self.master.dtype)

    def is_behind(self) -> bool:
        """Whether the parameter was written to otherwise since it had the master's values."""
        return self._state != self._state_now()

    def is_current(self) -> None:
        """Notes that the parameter has the master's values, or gets them before any other write."""
        self._state = self._state_now()

    def _state_now(self) -> tuple[int, int]:
        return self.parameter._version, self.parameter.data_ptr()

    def arrive(self) -> tuple[Tensor, Tensor]:
        """The source and the target of the copy that brings the parameter's values to the host."""
        return self.parameter.detach(), self._wire

    def take_values(self) -> None:
        """Makes the master follow the values that have arrived.

        Where a value is still the master's value, rounded, the master keeps its bits.
        """
        if self.is_half:
            is_other = self.master.to(self._wire.dtype) != self._wire
            values = self._wire.to(self.master.dtype)
            self.master.copy_(torch.where(is_other, values, self.master))
        self.is_current()

    def leave(self) -> tuple[Tensor, Tensor]:
        """The source and the target of the copy that gives the parameter the master's values."""
        if self.is_half:
            self._wire.copy_(self.master)
        return self._wire, self.parameter.detach()


class StageMirrors:
    """The mirrors of a stage, which are copied together.

    Attributes:
        mirrors: the mirrors of the stage's parameters.
        num_streamed: the number of gradients that the last `fetch` found on the host, unchanged.
    """

    def __init__(self, link: HostLink) -> None:
        self.mirrors: list[Mirror] = []
        self.num_streamed = 0
        self._link = link
        self._coming: list[UntilCopied] = []
        self._going: UntilCopied | None = None
        # The mirrors whose gradients `stream` has read, and the norms of these gradients.
        self._streamed: list[Mirror] = []
        self._norms = torch.empty(0, device="cpu")

    def add(self, parameter: nn.Parameter) -> Mirror:
        """Makes a mirror of a parameter of the stage; its values come with the next `fetch`."""
        self.mirrors.append(Mirror(parameter, self._link))
        return self.mirrors[-1]

    @torch.no_grad()
    def stream(self) -> None:
        """Starts to copy the existing gradients; call it on the stream that computes them."""
        found = {
            mirror: mirror.parameter.grad
            for mirror in self.mirrors
            if mirror.parameter.grad is not None and mirror.parameter.grad.layout is torch.strided
        }
        self._streamed = list(found)
        if found:
            self._norms = _norms(list(found.values()))
            self._read(found)

    def require_dense(self) -> None:
        """Raises TypeError if a gradient is not dense."""
        for mirror in self.mirrors:
            gradient = mirror.parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise TypeError(
                    f"gradients must be dense to go to the host, got layout {gradient.layout} for "
                    f"a parameter of shape {tuple(gradient.shape)}. Make the layer with "
                    "sparse=False"
                )

    @torch.no_grad()
    def fetch(self) -> None:
        """Starts to copy the gradients that were not streamed, or were written to since."""
        gradients = {
            mirror: mirror.parameter.grad
            for mirror in self.mirrors
            if mirror.parameter.grad is not None
        }
        fresh = self._fresh(gradients)
        self.num_streamed = len(fresh)
        self._read({mirror: g for mirror, g in gradients.items() if mirror not in fresh})
        self.follow()

    def _fresh(self, gradients: dict[Mirror, Tensor]) -> set[Mirror]:
        """The mirrors whose gradients have been streamed and are unchanged."""
        places = [
            (place, mirror)
            for place, mirror in enumerate(self._streamed)
            if mirror in gradients and mirror.has_read(gradients[mirror])
        ]
        self._streamed = []
        if not places:
            return set()
        # A write that torch does not count, such as a scaler's, changes the norm.
        before = self._norms[[place for place, _ in places]]
        now = _norms([gradients[mirror] for _, mirror in places])
        same = ((now == before) & now.isfinite()).tolist()
        return {mirror for (_, mirror), is_same in zip(places, same, strict=True) if is_same}

    def _read(self, gradients: dict[Mirror, Tensor]) -> None:
        pairs = [mirror.read(gradient) for mirror, gradient in gradients.items()]
        if pairs:
            self._coming.append(self._link.copy(pairs, to_host=True))

    @torch.no_grad()
    def follow(self) -> None:
        """Makes masters follow parameters that were written to otherwise."""
        behind = [mirror for mirror in self.mirrors if mirror.is_behind()]
        if not behind:
            return
        self._wait_for_going()
        self._link.copy([mirror.arrive() for mirror in behind], to_host=True)()
        for mirror in behind:
            mirror.take_values()

    def land(self) -> bool:
        """Waits for the copies, gives the masters their gradients; whether there are any."""
        while self._coming:
            self._coming.pop()()
        self._wait_for_going()
        for mirror in self.mirrors:
            mirror.take_gradient()
        return any(mirror.master.grad is not None for mirror in self.mirrors)

    @torch.no_grad()
    def give_back(self) -> None:
        """Starts to copy the masters that have been stepped to their parameters."""
        stepped = [mirror for mirror in self.mirrors if mirror.master.grad is not None]
        self._going = self._link.copy([mirror.leave() for mirror in stepped], to_host=False)
        for mirror in stepped:
            mirror.is_current()
            mirror.master.grad = None

    def _wait_for_going(self) -> None:
        if self._going is not None:
            self._going()
            self._going = None

    def join(self) -> None:
        """Makes torch's current stream wait for all copies of this stage."""
        self._link.join()


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of each gradient: [n], in float64 if any gradient is, otherwise in float32."""
    real = [torch.view_as_real(one) if one.is_complex() else one.detach() for one in gradients]
    is_double = any(one.dtype == torch.float64 for one in real)
    dtype = torch.float64 if is_double else torch.float32
    return torch.stack(torch._foreach_norm(real, 2, dtype=dtype))
