"""Reads the autograd graph of a stage: nodes that lead to its inputs, and nodes aside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class Graph:
    """The nodes behind some outputs, divided by whether they lead to one of the inputs.

    Attributes:
        reaches_inputs: whether any output depends on an input.
        forks: the nodes that lead to an input and also aside, to parameters alone, each with its
            edges aside by their positions. The edges are read at once: before torch 2.13, the node
            of a custom function loses its edges when the graph is freed.
        outputs_aside: positions of the outputs that depend on parameters alone.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        roots = [get_gradient_edge(output) for output in outputs]
        self._edges: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        self._leads = {get_gradient_edge(value).node: True for value in inputs}
        for root in roots:
            self._visit(root.node)
        self.reaches_inputs = any(self._leads[root.node] for root in roots)
        self.outputs_aside = [i for i, root in enumerate(roots) if self._is_aside(root.node)]
        self.forks: dict[Node, dict[int, GradientEdge]] = {}
        for node, edges in self._edges.items():
            if self._leads[node]:
                aside = {
                    position: GradientEdge(target, number)
                    for position, (target, number) in enumerate(edges)
                    if target is not None and not self._leads[target]
                }
                if aside:
                    self.forks[node] = aside
        self._entries = [[roots[i]] for i in self.outputs_aside]
        self._entries += [list(aside.values()) for aside in self.forks.values()]

    def _visit(self, root: Node) -> None:
        # Depth first without recursion: a node lies below its successors, and is left after them.
        stack = [(root, False)]
        while stack:
            node, leave = stack.pop()
            if leave:
                targets = (target for target, _ in self._edges[node])
                self._leads[node] = any(self._leads[t] for t in targets if t is not None)
            elif node not in self._leads:
                self._leads[node] = False
                self._edges[node] = node.next_functions
                stack.append((node, True))
                stack += [(target, False) for target, _ in self._edges[node] if target is not None]

    def _is_aside(self, node: Node | None) -> bool:
        return node is not None and not self._leads[node]

    def on_the_way(self) -> Iterator[Node]:
        """The nodes that lead to an input and are not forks."""
        return (node for node in self._edges if self._leads[node] and node not in self.forks)

    def meets_aside(self) -> bool:
        """Whether two forks, or an output aside and another, lead to the same node aside."""
        entry_of: dict[Node, int] = {}
        for entry, edges in enumerate(self._entries):
            stack = [edge.node for edge in edges]
            while stack:
                node = stack.pop()
                if node not in entry_of:
                    entry_of[node] = entry
                    stack += [target for target, _ in self._edges[node] if target is not None]
                elif entry_of[node] != entry:
                    return True
        return False

    def sums_alike(self) -> bool:
        """Whether sums aside round the same when all gradients of forks come first.

        Sums round the same unless three or more gradients meet, some from forks and some from nodes
        aside.
        """
        first = Counter((edge.node, edge.output_nr) for edges in self._entries for edge in edges)
        later = Counter(
            edge for node, edges in self._edges.items() if self._is_aside(node) for edge in edges
        )
        return all(later[edge] == 0 or later[edge] + first[edge] <= 2 for edge in first)


def leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a backward from the outputs would add to the `.grad` of."""
    seen: set[Node] = set()
    stack = [get_gradient_edge(output).node for output in outputs]
    leaves: list[Tensor] = []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack += [target for target, _ in node.next_functions if target is not None]
    return leaves


@cache
def _names_of_saved(node_type: type[Node]) -> list[str]:
    return [name for name in dir(node_type) if name.startswith("_raw_saved_")]


def saved_by(node: Node) -> Iterator[Any]:
    """The tensors, as torch wraps them, that the node has saved."""
    # Only torch's own node types are cached, since types of custom functions come and go.
    custom = isinstance(node, BackwardCFunction)
    for name in ["_raw_saved_tensors"] if custom else _names_of_saved(type(node)):
        value = getattr(node, name)
        for saved in value if isinstance(value, tuple) else (value,):
            if getattr(saved, "data", saved) is not None:
                yield saved
