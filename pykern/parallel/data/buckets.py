"""Gradients of some parameters, summed over the processes of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...tensors.dtensor import local
from ...tensors.parameters import gradient_dtype
from ..peers.waiting import Pending

# Small gradients share a bucket, because each collective has a fixed cost. A stage may have several
# buckets, so that one bucket is made while another is being summed.
BUCKET_BYTES = 25 * 2**20


class GradientSum:
    """The sum over processes of the gradients of parameters, which are on one device.

    A parameter without a gradient in any process stays without. A parameter with a gradient in some
    processes gets their sum in all processes. All processes must give equal lists of parameters.

    Args:
        parameters: the parameters that train, each once.
        group: the process group of the device.

    Attributes:
        pending: the collectives so far.
    """

    def __init__(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        self._parameters = parameters
        self._group = group
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._buckets = list(_buckets(parameters))
        self._flats: list[Tensor] = []
        self.pending: list[Pending] = []

    def launch(self) -> None:
        """Starts to sum the gradients in `.grad`, after the work on the current stream.

        Raises:
            TypeError: a gradient is sparse.
        """
        self._refuse_sparse()
        self._send(self._found())
        for bucket in self._buckets:
            self._send(flat_gradients(bucket))

    def _refuse_sparse(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TypeError(
                    "gradients must be dense to be summed over processes, got a sparse gradient "
                    f"of a parameter of shape {tuple(parameter.shape)}. Make the layer with "
                    "sparse=False"
                )

    def _found(self) -> Tensor:
        """One for each parameter with a gradient, without a copy that the host would wait for."""
        found = torch.ones(len(self._parameters), dtype=torch.float32, device=self._device)
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                found[number].zero_()
        return found

    def complete(self) -> None:
        """Takes part, with zeros, in what has not been started: this process has nothing to give.

        Peers wait for as many collectives of these sizes.
        """
        sizes = [len(self._parameters), *(sum(map(size_of, bucket)) for bucket in self._buckets)]
        dtypes = [torch.float32, *(gradient_dtype(bucket[0]) for bucket in self._buckets)]
        for size, dtype in list(zip(sizes, dtypes, strict=True))[len(self._flats) :]:
            self._send(torch.zeros(size, dtype=dtype, device=self._device))

    def _send(self, flat: Tensor) -> None:
        if not self._parameters:
            return
        self._flats.append(flat)
        self._note(dist.all_reduce(flat, group=self._group, async_op=True))

    def _note(self, work: Any) -> None:
        self.pending.append(Pending(work, on_host=self._device.type == "cpu"))

    def wait(self) -> None:
        """Waits for what has been started; on a GPU torch's current stream does.

        Raises:
            RuntimeError: a peer is gone, or has not come in time.
        """
        for pending in self.pending:
            pending.wait()

    def finish(self) -> None:
        """Puts the finished sums into `.grad`."""
        if not self._flats:
            return
        found, *flats = self._flats
        has = self._having(found)
        for bucket, flat in zip(self._buckets, flats, strict=True):
            self._take(bucket, flat, has)
        # The flat tensors are as large as all gradients, which may be dropped before the next step.
        self._flats.clear()

    def _having(self, found: Tensor) -> set[int]:
        """The ids of the parameters that have a gradient in any process."""
        # Reading the counts would wait for a GPU; mostly all parameters have own gradients.
        is_missing = any(parameter.grad is None for parameter in self._parameters)
        counts = found.tolist() if is_missing else [1.0] * len(self._parameters)
        pairs = zip(self._parameters, counts, strict=True)
        return {id(parameter) for parameter, count in pairs if count > 0}

    @torch.no_grad()
    def _take(self, parameters: Sequence[Tensor], sums: Tensor, has: Set[int]) -> None:
        """Puts the sums of parameters, behind one another, into those that have a gradient."""
        if sums.is_cuda:
            # The sums belong to the stream of the device, and are read on the current stream.
            sums.record_stream(torch.cuda.current_stream(sums.device))
        sizes = [size_of(parameter) for parameter in parameters]
        for parameter, part in zip(parameters, sums[: sum(sizes)].split(sizes), strict=True):
            if id(parameter) in has:
                _set_gradient(parameter, part)


def size_of(parameter: Tensor) -> int:
    """The number of the parameter's values that this process has."""
    return local(parameter).numel()


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in their order, neighbours of one type together as far as a bucket goes."""
    for dtype, alike in groupby(parameters, key=gradient_dtype):
        bucket: list[Tensor] = []
        held = 0
        for parameter in alike:
            num_bytes = size_of(parameter) * dtype.itemsize
            if bucket and held + num_bytes > BUCKET_BYTES:
                yield bucket
                bucket, held = [], 0
            bucket.append(parameter)
            held += num_bytes
        yield bucket


def flat_gradients(bucket: Sequence[Tensor]) -> Tensor:
    """The gradients of a bucket behind one another: one that is alone, as it is."""
    parts = [
        _zeros_for(local(parameter), parameter) if parameter.grad is None else local(parameter.grad)
        for parameter in bucket
    ]
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0].detach().view(-1)
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _set_gradient(parameter: Tensor, part: Tensor) -> None:
    """Puts values, behind one another, into the parameter's gradient."""
    if parameter.grad is None:
        parameter.grad = _zeros_for(parameter, parameter)
    into = local(parameter.grad)
    if into.data_ptr() != part.data_ptr():
        into.copy_(part.view_as(into))


def _zeros_for(like: Tensor, parameter: Tensor) -> Tensor:
    """Zeros in place of a gradient of the parameter, or of a part of it."""
    return torch.zeros_like(like, dtype=gradient_dtype(parameter))
