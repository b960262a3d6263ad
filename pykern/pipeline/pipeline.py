"""Pipeline: a model cut into stages, a plan for them, and the workers that run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import _C
from ..budget.budget import Budget
from ..budget.fit import Fitted
from ..budget.level_costs import StageCosts
from ..modes import as_before
from ..parallel.data.data import DataParallel, data_group
from ..parallel.peers.agreement import alike
from ..parallel.peers.first import of_first
from ..parallel.peers.groups import Peers
from ..parallel.peers.likeness import likeness
from ..parallel.tensor.tensor import TensorParallelism, open_tensor
from ..partition.balance import Balance, Partition
from ..partition.chain import call_of, max_stages, open_model, share_out
from ..partition.layers import make_stages, place_layers, refuse_foreign_devices
from ..partition.split_points import SplitAt
from ..plan import Kind
from ..plan.shares import Shares
from ..runtime import microbatch
from ..runtime.asynchronous.optimizers import MakeOptimizer
from ..runtime.batch import Batch, Call, Outputs
from ..runtime.devices import Devices, parse_devices
from ..runtime.driver import Program
from ..runtime.executor import Driver, open_driver
from ..runtime.features.batch_norm import DeferredBatchNorm, OrderOfUpdates
from ..runtime.features.beside import Beside
from ..runtime.features.finite import CheckFinite, Checks
from ..runtime.gpu.capture.policy import Capture
from ..runtime.in_order import InOrder
from ..runtime.loss import Loss, Losses, scale_of
from ..runtime.stage.stage import Stage
from ..verify import Verify, open_verify, parse_verify
from .asynchronous import Updates, Updating, choose_updates, refuse_layers
from .choose_levels import Levels, Recompute, choose_levels
from .choose_plan import Schedule, choose_plan
from .refusals import refuse_others, refuse_unsummed


class Pipeline(Updating):
    """A model that trains and predicts on several devices at once.

    It is an `nn.Module` with the parameters, buffers, `state_dict` names and modes of the model it
    was made from; the layers are shared, not copied.

    Args:
        model: an `nn.Sequential` or a list of modules, called one after another: the first may take
            several arguments, every other takes the output of the one before. Or any module with a
            forward of its own, which is recorded on the `sample` and cut (`pykern.trace`).
        devices: "cpu:4" for four CPU workers, "cuda" for every GPU, "cuda:0/4" for four groups of
            the SMs of one GPU, or a list with one name per device. Layers are moved to the GPU of
            their stage.
        schedule: a name or function of `pykern.schedules`, a `Plan`, or "auto" for the best that
            `pykern.search.auto` finds.
        microbatches: how many parts each batch is cut into; may be left out with a `Plan`.
        replicas: how many copies of the model run side by side, each on as many of the devices,
            in their order, and on every so many-th microbatch. The schedule, or `Plan`, is for one
            of them. All see one set of parameters; their gradients are summed in the step.
        loss_fn: called with (output, target) of a microbatch, or (output) when `step` gets no
            target; returns a tensor without dimensions. Runs in the last stage: it may train
            parameters of its own or of that stage, where it uses those of others the order of
            their sums is not fixed.
        reduction: how `loss_fn` combines the rows it is given. With "mean" each microbatch counts
            by its rows, so that the loss and the gradients are those of the mean over the full
            batch; with "sum" they are added.
        balance: how layers are shared out, see `pykern.partition`; None for "parameters".
        sample: an input as large as a microbatch, for `balance="time"` and for a model with a
            forward of its own: a tensor, a tuple of arguments, or a dict of keyword arguments.
        split_at: names of the layers, or modules, that stages begin with, all but the first; or a
            dict of names with a `SplitPoint` of torch.distributed.pipelining each.
        whole: names of modules, such as "decoder", each kept in one stage with its submodules.
        capture: whether the actions of a training step are captured as CUDA graphs, which replay
            without Python. True: the first step of a kind runs as usual and the second captures it,
            or says what cannot be captured and why. "auto": where something cannot be, all steps
            run as usual, with one warning. "step": as True, and all graphs and copies of a step
            become one graph. A step whose shapes are not the captured ones runs as usual, with
            one warning.
        recompute: what a forward keeps for its backward. A level for all stages: "none", "ops" or
            "ops+stash" for what pykern's kernels keep, "layer" or "stage" to keep inputs only and
            compute the rest once more, in an action of its own (R); or a list with an entry for
            each stage, which is a level, None, or a list of these with an entry for each
            microbatch; or a `Budget`, which chooses. `fitted` then says what was chosen. An R of
            the last stage calls `loss_fn` once more.
        check_finite: what must be finite, or a FloatingPointError says which tensor of which stage
            and microbatch is not: "loss", "grads" (also the parameters' gradients, after each
            microbatch; left to the scaler where `step` gets one) or "activations" (also the batch
            and what layers return). On GPUs each look waits for what it looks at.
        deferred_batch_norm: whether running statistics of batch normalisation move once in a step,
            by those of the full batch, not once for each microbatch. A step that fails leaves them.
        process_group: of processes that each have such a pipeline and train one model with batches
            of their own; or a mesh of one dimension. Losses and gradients are those of all
            processes' rows. A stage's gradients are on their way as soon as they are complete.
        optimizer: for schedules that update weights within a step ("pipedream", "pipedream_2bw"),
            and only for them: makes an optimizer of a list of parameters. Steps then leave
            microbatches in flight, see `flush` and docs/asynchronous.md.
        tensor_parallel: (mesh, styles): the processes of a mesh of one dimension each run their
            slices of every stage, for the same batches. Styles are by name of a module, as torch's
            `parallelize_module` takes them; parameters of these become DTensors, new objects.
        verify: whether the first step also runs the plain model and compares loss, gradients and
            buffers. True verifies the first step, a number n also every n-th step after it. A
            `Verify` sets tolerances too. See docs/verify.md.
        timeout: seconds that an action of a CPU worker may take; None for no limit. After that
            time the step or stream raises `PipelineStalled`, and the pipeline is closed. The limit
            is checked every 20 ms, outside of actions. Where a call in C keeps the interpreter lock
            for that long, a message on stderr says so.
        **options: for the schedule, e.g. `waves=2`; for "auto" e.g. `memory=0.5`.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing has been started.
        PeerError: another process's pipeline differs, or has not been made in time.
        PlanError: the plan cannot run.
    """

    # What a `Budget` has led to.
    fitted: Fitted | None = None

    def __init__(  # noqa: PLR0913 - all that a pipeline is made of, by keyword
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        devices: Devices,
        schedule: Schedule = "one_f_one_b",
        microbatches: int | None = None,
        replicas: int = 1,
        loss_fn: Loss | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        balance: Balance | None = None,
        sample: Any = None,
        split_at: SplitAt | None = None,
        whole: Sequence[str] = (),
        capture: Capture = False,
        recompute: Recompute | Budget = None,
        check_finite: CheckFinite = "off",
        deferred_batch_norm: bool = False,
        process_group: Peers | None = None,
        optimizer: MakeOptimizer | None = None,
        tensor_parallel: TensorParallelism | None = None,
        verify: bool | int | Verify = False,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        verified = parse_verify(verify, process_group, tensor_parallel)
        refuse_others(model, Pipeline, reduction, deferred_batch_norm)
        lanes = parse_devices(devices)
        shares = Shares(len(lanes), microbatches, replicas)
        updates = choose_updates(schedule, shares, lanes, options, locals())
        group = None if process_group is None else data_group(process_group, capture)
        joined = process_group is not None or tensor_parallel is not None
        plan = updates.parts.plan if updates is not None else None
        if plan is None:
            plan = choose_plan(schedule, shares, max_stages(model), options, joined)
        asked = None if isinstance(recompute, Budget) else recompute
        plan, self._levels = choose_levels(plan, asked)
        self._tensor = open_tensor(tensor_parallel, plan, capture, recompute)
        peers = [each for each in (group, self._tensor.group) if each is not None]
        chain = open_model(model, sample, plan.num_stages, split_at, whole)
        layers, self._reduction = chain.layers, reduction
        refuse_foreign_devices(layers, lanes[0].device.type)
        share = partial(share_out, chain, plan.num_stages, balance, sample, split_at)
        cut = of_first(peers, share, Partition) if balance == "time" else share()
        refuse_layers(updates, layers, cut)
        self._checks = Checks(check_finite, list(layers), cut.stages, captures=capture is not False)
        refuse_unsummed(plan, layers, loss_fn, group)
        self.plan, self.partition, self._reduction = plan, cut, reduction
        self._adopt(chain, loss_fn)
        self._tensor.find(self, list(layers.values()), cut)
        with ExitStack() as undo:
            driver = open_driver(lanes, capture, timeout)
            undo.callback(driver.close)
            stages = self._make_stages(driver, recompute, updates, peers)
            undo.callback(self._tensor.close)
            self._watch(stages, verified, deferred_batch_norm)
            self._data = None if group is None else self._connect(stages, group)
            undo.pop_all()

    def _make_stages(
        self,
        driver: Driver,
        recompute: Recompute | Budget,
        updates: Updates | None,
        peers: Sequence[ProcessGroup],
    ) -> list[Stage]:
        """Places the layers and has a driver run them."""
        chain, cut, plan = self._chain, self.partition, self.plan
        devices_of = [driver.device(lane) for lane in range(plan.num_devices)]
        homes = [devices_of[plan.placement.device_of(s)] for s in range(plan.num_stages)]
        place_layers(chain.layers, cut, homes)
        chain.cut(cut.stages, homes, driver.direct(plan))
        self._tensor.slice(self, homes[0].type, self._told())
        chain.forget()
        stages = make_stages(list(chain.layers.values()), cut, homes)
        if isinstance(recompute, Budget):
            budget = replace(recompute, sample=chain.first_input(recompute.sample))
            measure = partial(budget.measure, plan, stages, self._loss_fn)
            self.fitted = budget.fit(plan, of_first(peers, measure, list[StageCosts]))
            self.plan, self._levels = self.fitted.plan, cast("Levels", self.fitted.by_microbatch())
        self._open_executor(stages, devices_of, driver, updates)
        self._train_program = self._executor.program(self.plan)
        self._predict_program = self._executor.program(self.plan.forward_only())
        return stages

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        scaler: Any = None,
        **named: Any,
    ) -> Tensor:
        """Forward and backward of one batch on all devices.

        Adds to every parameter's `.grad` what the plain model's backward would add, and never
        rescales what is there. Microbatches add up in the order of the plan's B and W, which is
        ascending in all of `pykern.schedules`; where the plan has replicas, those of the first do,
        then the sum of each other is added. Where stages share a parameter, those of the first do,
        and when the step has ended, the sum of each other stage is added, in ascending order. A
        parameter's hooks are called for each of these additions. A loss that does its part of the
        backward at once (`pykern.kernels.head_loss`) adds the gradients of its weight in the order
        of F.

        Args:
            *inputs: arguments of the first layer, or of the model's own forward; tensors anywhere
                in them have one row per sample in dimension 0, everything else is given to every
                microbatch. The number of rows may change from step to step and need not be a
                multiple of the microbatches.
            target: second argument of the loss function, cut in the same way.
            scaler: a `torch.amp.GradScaler`, by whose scale gradients are multiplied, as
                `scaler.scale(loss)` would do.
            **named: arguments by name, cut in the same way, for every layer whose forward names
                them, or for the model's own forward.

        Returns:
            The loss of the full batch, detached, not scaled, without dimensions.

        Raises:
            SplitError: the batch cannot be cut.
            TypeError: `scaler` is none.
            RuntimeError: there is no loss function, gradients are off, the plan has no backward, a
                layer was replaced, a tensor of the batch has a graph of its own, or a step is
                running.
            VerifyError: `verify` has found that the plain model gives something else.
            BaseException: the first exception of a stage, the same object, with a note of where.
                The gradients of that step are then undefined; the next step is not affected.
        """
        with _C.HoldForks(), as_before(), self._tensor.step(scaler):
            if self._data is None:
                return self._step(inputs, named, target, scaler)
            with self._data.step():
                self._data.owners.require_scaler(scaler)
                return self._step(inputs, named, target, scaler)

    def _step(
        self, inputs: tuple[Any, ...], named: dict[str, Any], target: Any, scaler: Any
    ) -> Tensor:
        """This process's part of a step."""
        if self._loss_fn is None:
            raise RuntimeError("step needs a loss: Pipeline(..., loss_fn=...)")
        if not torch.is_grad_enabled():
            raise RuntimeError("step computes gradients, but they are off here (torch.no_grad?)")
        if not (self.plan.has(Kind.B) or self.plan.has(Kind.I)):
            raise RuntimeError("the plan has forward actions only; call the pipeline itself")
        self._chain.require_unchanged(self._modules)
        rows = self._rows((inputs, named, target))
        microbatch.refuse_graphs((inputs, named, target))
        call, target = self._executor.place((inputs, named), target)
        parts = None if target is None else microbatch.split(target, rows)
        targets = None if parts is None else self._executor.place_targets(parts)
        scale, checked = scale_of(scaler, self._executor.end), self._checks.of_losses
        self._tensor.begin(sum(rows), (call, target))
        total = sum(rows) if self._data is None else self._data.begin(sum(rows))
        weights = [w for of in self._groups(rows, total) for w in self._weights(*of)]
        losses = Losses(
            self._loss_fn,
            targets,
            weights,
            scale,
            must_be_finite=checked,
            in_one_memory=self._executor.in_one_memory,
        )
        batch = Batch(call, target, rows, losses, self._levels, self._chain.enter)
        if self.optimizer is not None:
            return self._give(batch, scale)
        # Still in the step: what peers say may make it one that fails.
        data = self._data
        result = losses.total if data is None else lambda: data.finish(losses.total())
        return self._run(self._train_program, batch, result)  # type: ignore[no-any-return]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Forward only, without gradients: the model's output for the whole batch.

        Args:
            *inputs: as for `step`.
            **named: as for `step`.

        Returns:
            What the last layer returns, its tensors joined along dimension 0. One without
            dimensions, such as a loss that the model computes, counts as `reduction` says.
        """
        with _C.HoldForks(), as_before():
            self._chain.require_unchanged(self._modules)
            merged = self._steps.predict(self._predict_program, *self._open_batch((inputs, named)))
            self._last_program = self._predict_program
            return merged

    def stream(self, batches: Iterable[Any]) -> InOrder:
        """The outputs of batches, each what the pipeline returns for it alone, bit for bit.

        No device waits for the end of a batch: the next are asked for, in the calling thread, and
        under way while the caller has one output. Layers that draw random numbers get their batches
        one by one instead, as in a loop, and so does the first until that is known. Until the
        iterator ends, is left or closed, the pipeline does nothing else; nor may the model change.

        Args:
            batches: of any sizes, perhaps without end: a tensor, a tuple of arguments, or a dict of
                keyword arguments.

        Returns:
            An iterator of the outputs, in the order of the batches, with a method `close`.

        Raises:
            RuntimeError: the pipeline is streaming already, or running a step; or a stage has
                raised StopIteration, which is then the cause.
            BaseException: as for `step`, or from `batches`, after the outputs of earlier batches.
                The note names the batch, counted from 0 like microbatches.
        """
        self._chain.require_unchanged(self._modules)
        calls = map(call_of, batches)
        return self._executor.stream(self._predict_program, calls, self._open_batch)

    def _open_batch(self, call: Call) -> tuple[Batch, Outputs]:
        self._tensor.require_peers()
        rows = self._rows(call)
        call, _ = self._executor.place(call, None)
        outputs = Outputs(self._weights(rows, sum(rows)))
        return Batch(call, None, rows, outputs, (), self._chain.enter), outputs

    def close(self) -> None:
        """Ends the worker threads, or gives back GPU memory; the layers stay usable.

        Happens by itself at exit.
        """
        self._executor.close()
        self._deferred.close()
        self._tensor.close()
        if self._data is not None:
            self._data.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _watch(self, stages: Sequence[Stage], verified: Verify | None, deferred: bool) -> None:
        """Has what looks at steps look at them."""
        self._deferred = DeferredBatchNorm(stages if deferred else ())
        self._executor.watch(self._checks.around)
        self._chain.before_recording(self._executor.settle)
        self._executor.watch(OrderOfUpdates().around)
        self._executor.watch(self._deferred.around)
        if self._deferred.is_needed:
            self._executor.observe(self._deferred)
        self._tensor.watch(self._executor, stages)
        Beside(stages, self._loss_fn, self._chain.origins)
        run = self.partition, self.plan, self._reduction, deferred
        self._steps = open_verify(verified, self._executor, self._chain, run)

    def _told(self) -> dict[str, str]:
        """What the pipelines of other processes have to have alike."""
        told = {"reduction": self._reduction, "the loss function": likeness(self._loss_fn)}
        return told | alike(self.plan, self.partition, self)

    def _connect(self, stages: Sequence[Stage], group: ProcessGroup) -> DataParallel:
        """Joins the pipelines of other processes."""
        return DataParallel(stages, self.plan, group, self, self._told())

    def _rows(self, batch: Any) -> list[int]:
        return microbatch.sizes(microbatch.batch_size(batch), self.plan.num_microbatches)

    def _weights(self, rows: Sequence[int], total: int) -> list[float]:
        return [1.0 if self._reduction == "sum" else n / total for n in rows]

    def _run(self, program: Program, batch: Batch, result: Callable[[], Any] = lambda: None) -> Any:
        found = self._steps.run(program, batch, result)
        self._last_program = program
        return found
