"""Backward in two parts: I computes gradients of a stage's inputs, W gradients of parameters.

Both run one autograd graph. I runs the nodes that lead to an input. Some of them are forks, such as
the product of a linear layer: I skips their gradients for parameters and keeps their incoming
gradients. From these W computes the skipped gradients, and sends them on with an ordinary backward,
so that sums round as in a whole backward and the hooks of parameters fire once. Custom functions of
two parts (`pykern.kernels.handover`) define the computation of W themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...kernels.handover import Weights, edges_of_weights, taking
from ...tensors.strides import copy_of
from ...torch_private import NODES_LAST, WHOLE, run_backward
from .graph import Graph, saved_by

Work = Callable[[], object]
RunBackward = Callable[..., object]
# In the order in which I ran the forks: the number of a fork, and its incoming gradients or the
# function that it has handed over.
Kept = list[tuple[int, tuple[Tensor | None, ...] | Weights]]


def backward_to_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    finish_earlier: Work,
    run: RunBackward = run_backward,
) -> Work | None:
    """Runs backward from the outputs of a stage, and fills the `.grad` of its inputs.

    The graph runs as a whole if splitting it would call user code twice, or would change the order
    of gradient sums.

    Args:
        outputs: tensors that require grad.
        gradients: one for each output.
        inputs: leaves of the graph.
        finish_earlier: runs the remaining work of earlier calls; called before a backward as a
            whole, so that gradients still add up in order.
        run: runs a backward from the outputs: `run_backward`, or `checked_backward` if gradients
            may not fit.

    Returns:
        The remaining work for the parameters, to be called once; None if there is nothing to do.
    """
    if not outputs:
        return None
    outputs, gradients = tuple(outputs), tuple(gradients)
    graph = Graph(outputs, inputs)
    if not graph.reaches_inputs:
        return partial(run, outputs, gradients, *WHOLE)
    forks = list(graph.forks)
    kept: Kept = []
    if not (forks or graph.outputs_aside):
        run(outputs, gradients, *WHOLE)
        return None
    if not _can_split(graph) or not _keep(forks, kept):
        finish_earlier()
        run(outputs, gradients, *WHOLE)
        return None
    number_of = {fork: number for number, fork in enumerate(forks)}
    with taking(lambda node, weights: kept.append((number_of[node], weights))):
        # These flags differ from WHOLE: the graph is kept, and only these leaves get gradients.
        run(outputs, gradients, True, False, tuple(inputs), True, True)
    for node in graph.on_the_way():
        _release(node)
    for node in forks:
        if edges_of_weights(node) is not None:
            _release(node)
    weights = _Weights(graph, kept)
    for position in graph.outputs_aside:
        weights.start(outputs[position], gradients[position])
    return weights.run


def _can_split(graph: Graph) -> bool:
    # Reentrant checkpointing refuses a backward to given inputs.
    if any("Checkpoint" in type(node).__name__ for node in graph.on_the_way()):
        return False
    for node, aside in graph.forks.items():
        if isinstance(node, BackwardCFunction):
            # A user's function must run once, and may compute all its gradients anyway. A function
            # of two parts can be split if its second part has exactly the weights that lie aside.
            if edges_of_weights(node) != list(aside) or not _outlast(aside.values()):
                return False
            continue
        # Unpacking twice is correct but may be costly: in checkpointing it repeats a forward.
        if any(getattr(saved, "unpack_hook", None) is not None for saved in saved_by(node)):
            return False
    return graph.sums_alike()


def _outlast(edges: Iterable[GradientEdge]) -> bool:
    """Whether the nodes behind these edges outlive the graph in front of them."""
    return NODES_LAST or not any(isinstance(edge.node, BackwardCFunction) for edge in edges)


def _keep(forks: Sequence[Node], kept: Kept) -> bool:
    """Has each fork keep its incoming gradients. Returns False, and undoes it, for user hooks."""
    handles = []
    for number, fork in enumerate(forks):
        if isinstance(fork, BackwardCFunction):
            continue
        # The hook must not hold its node: the garbage collector cannot free such a cycle.
        handle = fork.register_hook(partial(_keep_incoming, kept, number))
        handles.append(handle)
        if len(handle.hooks_dict_ref() or ()) > 1:
            for registered in handles:
                registered.remove()
            return False
    return True


def _keep_incoming(kept: Kept, number: int, _: Any, incoming: tuple[Tensor | None, ...]) -> None:
    kept.append((number, incoming))


def _release(node: Node) -> None:
    """Frees the saved tensors of the node, although forks before it keep the node alive."""
    for saved in saved_by(node):
        # torch refuses this where a saved tensor has hooks of the user.
        with suppress(RuntimeError):
            saved.register_hooks(_drop, _refuse)


def _drop(_: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise RuntimeError("this part of a stage's graph has been freed by its input gradients")


class _Weights:
    """The gradients of parameters that I has left out."""

    def __init__(self, graph: Graph, kept: Kept) -> None:
        self._forks: list[tuple[Node, dict[int, GradientEdge]] | None] = list(graph.forks.items())
        self._kept = kept
        # Gradients that meet aside are sent on together, or they would add up in another order.
        self._together = graph.meets_aside()
        self._edges: list[GradientEdge] = []
        self._gradients: list[Tensor] = []

    def start(self, output: Tensor, gradient: Tensor) -> None:
        """Adds an output that depends on parameters alone."""
        self._edges.append(get_gradient_edge(output))
        self._gradients.append(gradient)

    def run(self) -> None:
        """Adds to the `.grad` of all parameters."""
        wanted: Any = [edge for fork in self._forks if fork for edge in _wanted(*fork)]
        seed = torch.zeros((), device="cpu", requires_grad=True)
        inside = _InBackward.apply(seed, self._run)  # type: ignore[no-untyped-call]
        torch.autograd.grad(inside, [seed, *wanted], allow_unused=True)

    def _run(self) -> None:
        self._kept.reverse()
        while self._kept:
            number, kept = self._kept.pop()
            fork, self._forks[number] = self._forks[number], None
            assert fork is not None
            self._compute(*fork, kept)
            if not self._together:
                self._send()
        self._send()

    def _compute(
        self,
        node: Node,
        aside: dict[int, GradientEdge],
        kept: tuple[Tensor | None, ...] | Weights,
    ) -> None:
        # A node that is called directly runs no hooks; the hooks of its tensors have run in I.
        gradients: Any = kept() if callable(kept) else node(*kept)  # type: ignore[operator]
        came = None if callable(kept) else kept[0]
        for position, edge in aside.items():
            gradient = gradients[position]
            if gradient is not None:
                # The engine would do the same, since nodes leave sums over broadcast rows to it.
                shape = edge.node._input_metadata[edge.output_nr].shape
                total = gradient.sum_to_size(shape)
                self._edges.append(edge)
                # The previous stage may share the memory of the incoming gradient, and a parameter
                # would make it the `.grad` that later microbatches write into.
                self._gradients.append(copy_of(came) if total is came else total)

    def _send(self) -> None:
        edges, gradients = self._edges, self._gradients
        self._edges, self._gradients = [], []
        if edges:
            run_backward(tuple(edges), tuple(gradients), *WHOLE)


def _wanted(node: Node, aside: dict[int, GradientEdge]) -> Iterable[GradientEdge]:
    """The edges of the gradients that the node computes in W: the edges in `aside`.

    A channels-last group norm writes the input gradient whenever the gradients of weight and bias
    are requested. Without memory for the input gradient, the process would crash, as torch does for
    a frozen input.
    """
    if type(node).__name__ == "NativeGroupNormBackward0":
        normalised: Tensor = node._saved_input  # type: ignore[attr-defined]
        if not normalised.is_contiguous():
            edges: Any = node.next_functions
            return [GradientEdge(*edge) for edge in edges]
    return aside.values()


class _InBackward(torch.autograd.Function):
    """Does some work inside a backward.

    Within a backward, a node computes only the gradients of edges given as inputs of the backward.
    Outside, a node would compute all its gradients, also the gradients that I has computed.
    """

    @staticmethod
    def forward(ctx: Any, seed: Tensor, work: Work) -> Tensor:
        ctx.work = work
        return seed.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        ctx.work()
        return None, None
