"""ZeRO-1: an optimizer whose state is shared out to the processes of a data-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import CheckpointError
from ..checkpoint.optimizer_state import OptimizerState
from ..modes import as_before
from ..parallel.peers.errors import shown
from ..parallel.peers.texts import text_of
from ..pipeline.pipeline import Pipeline
from ..plan.files.typed_json import from_text, to_text
from ..tensors.dtensor import local
from .clipping import clip_by, norm_of, require_norm, shared_out
from .gathering import states_of_all
from .inner import (
    copy_settings,
    groups_of,
    loss_of,
    refuse_foreign,
    show_state,
    take_settings,
    take_state,
    with_settings,
)
from .shards import part_of, parts_of_whole, stepped_part, zero_redundancy_optimizer
from .zero_refusals import data_of, require_steppable


class ZeroOptimizer(Optimizer):
    """Any of torch's optimizers, its state shared out to the processes of a pipeline's group.

    The work is done by torch's `ZeroRedundancyOptimizer`: each process steps some parameters, and
    sends them to the others. From now on each process gets the gradient sums of its own parameters
    only, by one reduce-scatter for each stage and step; after a step its other gradients are None.
    Updates equal the plain optimizer's bit for bit if the gradient sums do.

    All processes must make this optimizer, and call its methods (except `zero_grad`), in one order.

    Args:
        pipe: a pipeline with a `process_group`.
        optimizer_class: a class of `torch.optim`, or a similar class, which updates each parameter
            by its own gradient and state alone.
        params: all parameters of the pipeline that train, or groups of them, as for any optimizer;
            None for all parameters that train.
        stage: 1.
        **defaults: arguments of the optimizer.

    Raises:
        TypeError: the optimizer looks at all parameters at once, or at whole parameters, which
            shards are not; or parameters are of several types, which torch's optimizer refuses.
        ValueError: the pipeline has no `process_group`; stages 2 and 3, with the reason; a
            parameter is not the pipeline's, or not contiguous, which it has to be to be sent.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer_class: type[Optimizer],
        params: Iterable[Any] | None = None,
        *,
        stage: int = 1,
        **defaults: Any,
    ) -> None:
        self._data = data_of(pipe, optimizer_class, stage)
        groups = groups_of(pipe, params)
        self._rank = self._data.group.rank()
        # The tensor stepped for each parameter: for a DTensor, the part that this process has.
        self._local_of: dict[Tensor, nn.Parameter] = {}
        locals_ = [self._locally(group) for group in groups]
        require_steppable(optimizer_class, self._local_of)
        # The partition of parameters over processes is private to torch's optimizer.
        self._zero: Any = zero_redundancy_optimizer()(
            locals_, optimizer_class, process_group=self._data.group, **defaults
        )
        inner = self._zero.optim
        super().__init__(with_settings(groups, inner.param_groups), inner.defaults)
        self._share_out()
        self._link_state()

    def _locally(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group, with the stepped tensors in place of the parameters."""
        refuse_foreign(group["params"], set(self._data.model.parameters()))
        for parameter in group["params"]:
            self._local_of[parameter] = stepped_part(parameter)
        return group | {"params": [self._local_of[each] for each in group["params"]]}

    def _share_out(self) -> None:
        """Makes the pipeline sum each gradient in the process that steps its parameter."""
        ranks = {
            id(stepped): rank
            for rank, groups in enumerate(self._zero._partition_parameters())
            for group in groups
            for stepped in group["params"]
        }
        owner_of = {each: ranks[id(stepped)] for each, stepped in self._local_of.items()}
        self._owned = [each for each, owner in owner_of.items() if owner == self._rank]
        devices = {each.device for each in owner_of}
        has = {(each.device, owner) for each, owner in owner_of.items()}
        everybody = range(self._data.group.size())
        lacks = [(d, rank) for d in devices for rank in everybody if (d, rank) not in has]
        refused = ""
        if lacks and len(devices) > 1:
            device, rank = lacks[0]
            refused = (
                f"process {rank} owns no parameter on {device}, and ShardedGradScaler would wait "
                "there for ever for what it finds"
            )
        self._data.owners.share_out(owner_of, refused)
        for each in owner_of:
            shared_out[each] = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the pipeline, as for any optimizer; in all processes."""
        is_made = hasattr(self, "_owned")
        if is_made:
            self._follow()
        super().add_param_group(param_group)
        if is_made:
            self._zero.add_param_group(self._locally(self.param_groups[-1]))
            self._share_out()
            self._link_state()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this process's parameters, and gets the others from their owners.

        Args:
            closure: computes the gradients first; its result is returned.

        Raises:
            ValueError: parameters were moved between groups. Nothing has been stepped.
            PeerError: a process is gone, or has not come in time.
        """
        loss = loss_of(closure)
        self._follow()
        for parameter in self._owned:
            if parameter is not self._local_of[parameter]:
                gradient = parameter.grad
                self._local_of[parameter].grad = None if gradient is None else local(gradient)
        try:
            with self._data.talking():
                self._zero.step()
        finally:
            self._link_state()
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips as `pykern.clip_grad_norm_`, by the norm of all parameters over all processes.

        Norms are combined in the order of the parameters, so the bits do not depend on the number
        of processes.

        Args:
            max_norm: the largest norm afterwards, up to rounding.
            norm_type: p of the p-norm; may be `inf`.
            error_if_nonfinite: whether a norm that is infinite or NaN is an error.

        Returns:
            The norm before, [], the same in all processes; 0 without gradients.

        Raises:
            ValueError: `max_norm` is negative or NaN.
            RuntimeError: `error_if_nonfinite` is set, but the norm is not; gradients are unchanged.
            PeerError: a process is gone, or has not come in time.
        """
        require_norm(max_norm)
        order = {parameter: number for number, parameter in enumerate(self._local_of)}
        device = next(iter(order)).device
        dtype = torch.promote_types(next(iter(order)).dtype, torch.float32)
        # Each column has a parameter's norm, and 1 if it has a norm; only its owner adds to it.
        norms = torch.zeros(2, len(order), dtype=dtype, device=device)
        with as_before(), torch.no_grad():
            for parameter in self._owned:
                if parameter.grad is not None:
                    norms[0, order[parameter]] = norm_of(parameter.grad, norm_type).to(device)
                    norms[1, order[parameter]] = 1
        with self._data.talking():
            dist.all_reduce(norms, group=self._data.group)
        found = norms[0][norms[1] > 0]
        if not len(found):
            return torch.zeros(())
        mine = [each.grad for each in self._owned if each.grad is not None]
        return clip_by(mine, list(found), max_norm, norm_type, error_if_nonfinite)

    def _link_state(self) -> None:
        """Makes `state` show this process's share, by the pipeline's parameters."""
        show_state(self, self._zero.optim.state, self._stepped())

    def _follow(self) -> None:
        """Makes the inner optimizer follow what the user has changed in groups and `state`."""
        take_settings(self, self._zero.param_groups, self._local_of)
        take_state(self, self._zero.optim.state, self._stepped())

    def _stepped(self) -> list[tuple[Tensor, Tensor]]:
        return [(parameter, self._local_of[parameter]) for parameter in self._owned]

    def _numbers(self) -> list[int]:
        """The numbers of this process's parameters among those of all groups."""
        owned = set(self._owned)
        in_order = (each for group in self.param_groups for each in group["params"])
        return [number for number, parameter in enumerate(in_order) if parameter in owned]

    def state_dict(self) -> dict[str, Any]:
        """This process's share, and as `owned` the numbers of this process's parameters."""
        self._follow()
        return {**super().state_dict(), "owned": self._numbers()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this process's share from its `state_dict`, or a plain optimizer's state.

        Raises:
            ValueError: the share is of a process with other parameters. Nothing has been changed.
        """
        if missing := set(mine := self._numbers()).difference(state_dict.get("owned", mine)):
            raise ValueError(
                "state_dict must be the share of this process, got one without parameters "
                f"{sorted(missing)}. Save the run by pykern.checkpoint.save, in every process"
            )
        self._zero.load_state_dict({**state_dict, "state": dict(state_dict["state"])})
        self.adopt()

    @contextmanager
    def saving(self) -> Iterator[bool]:
        """The context in which a run is saved; gives whether this process writes the file.

        Raises:
            CheckpointError: the process that writes the file has failed.
            PeerError: a process is gone, or has not come in time.
        """
        self._follow()
        with self._data.talking():
            states, failure = states_of_all(self._zero.optim.state_dict(), self._data.control)
        outcome = ""
        try:
            if failure:
                raise CheckpointError(failure)
            self._zero._all_state_dicts = states
            yield self._rank == 0
        except BaseException as error:
            outcome = shown(error)
            raise
        finally:
            self._zero._all_state_dicts = []
            if self._rank == 0:
                self._tell(outcome)
        if self._rank != 0 and (failed := self._tell("")):
            raise CheckpointError(f"process 0 has not written the file: {failed}")

    def _tell(self, outcome: str) -> str:
        """Sends the first process's outcome to all: the text of its failure, or an empty text."""
        with self._data.talking():
            return from_text(str, text_of(to_text(outcome), self._data.control, 0))

    def whole(self) -> OptimizerState:
        """The state of all processes; complete within `saving`, in the process that writes."""
        indexed = self._zero.state_dict()["state"]
        in_order = [each for group in self.param_groups for each in group["params"]]
        state = {in_order[i]: parts_of_whole(in_order[i], of) for i, of in indexed.items()}
        return OptimizerState(self._kind, self.param_groups, state)

    def own(self) -> OptimizerState:
        """The state into which this process's share of a checkpoint is loaded."""
        self._follow()
        owned = {id(parameter) for parameter in self._owned}
        return OptimizerState(
            self._kind,
            self._zero.param_groups,
            self._zero.optim.state,
            lambda parameter: self._local_of.get(parameter, parameter),
            lambda parameter: id(parameter) in owned,
        )

    def adopt(self) -> None:
        """Shows the loaded state, and keeps only this process's parts of DTensors."""
        kept = self._zero.optim.state
        for stepped, entries in kept.items():
            kept[stepped] = {key: part_of(value) for key, value in entries.items()}
        copy_settings(self._zero.param_groups, to=self.param_groups)
        self._link_state()

    @property
    def _kind(self) -> type[Optimizer]:
        found: type[Optimizer] = type(self._zero.optim)
        return found

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ZeroOptimizer cannot be copied or pickled, because it belongs to a group of "
            "processes. Save the run by pykern.checkpoint.save"
        )
