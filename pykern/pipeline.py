"""Pipeline: a model cut into stages, a plan for them, and the workers that run it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from .budget import Budget
from .chain import Chain, RecordedChain, call_of, max_stages, open_model, share_out
from .choice import Schedule, choose_plan
from .devices import Devices, parse_devices
from .fit import Fitted
from .layers import place_layers, refuse_foreign_devices, refuse_inside, refuse_shared
from .levels import Levels, Recompute, choose_levels
from .partition import Balance, Partition
from .plan import Costs, Kind, Timeline, simulate
from .runtime import microbatch
from .runtime.batch import Batch, Call, Outputs
from .runtime.batch_norm import DeferredBatchNorm
from .runtime.executor import Driver, Executor, Program, open_driver
from .runtime.finite import CheckFinite, Checks
from .runtime.loss import Loss, Losses, scale_of
from .runtime.recorder import Capture
from .runtime.replica import refuse_replicas, refuse_trained_loss
from .runtime.stage import Stage
from .split_points import SplitAt
from .step_costs import mean_costs


class Pipeline(nn.Module):
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
        **options: for the schedule, e.g. `waves=2`; for "auto" e.g. `memory=0.5`.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing has been started.
        PlanError: the plan cannot run.
    """

    _last_program: Program | None = None

    def __init__(  # noqa: PLR0913 - all that a pipeline is made of, by keyword
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        devices: Devices,
        schedule: Schedule = "one_f_one_b",
        microbatches: int | None = None,
        loss_fn: Loss | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        balance: Balance | None = None,
        sample: Any = None,
        split_at: SplitAt | None = None,
        capture: Capture = False,
        recompute: Recompute | Budget = None,
        check_finite: CheckFinite = "off",
        deferred_batch_norm: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is 'mean' or 'sum', got {reduction!r}")
        refuse_inside(model, Pipeline)
        lanes = parse_devices(devices)
        plan = choose_plan(schedule, len(lanes), microbatches, max_stages(model), options)
        asked = None if isinstance(recompute, Budget) else recompute
        plan, self._levels = choose_levels(plan, asked)
        chain = open_model(model, sample, plan.num_stages, split_at)
        layers = chain.layers
        refuse_foreign_devices(layers, lanes[0].device.type)
        cut = share_out(chain, plan.num_stages, balance, sample, split_at)
        refuse_shared(layers, cut)
        self._checks = Checks(check_finite, list(layers), cut.stages, captures=capture is not False)
        if plan.placement.num_replicas > 1:
            refuse_replicas(layers)
            refuse_trained_loss(loss_fn)

        self.plan = plan
        self.partition = cut
        # What a `Budget` has led to.
        self.fitted: Fitted | None = None
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._adopt(chain)
        driver = open_driver(lanes, capture)
        devices_of = [driver.device(lane) for lane in range(len(lanes))]
        homes = [devices_of[plan.placement.device_of(s)] for s in range(plan.num_stages)]
        place_layers(layers, cut, homes)
        chain.cut(cut.stages, homes, driver.direct(plan))
        stages = _stages(list(layers.values()), cut, homes)
        if isinstance(recompute, Budget):
            sample_of = replace(recompute, sample=chain.first_input(recompute.sample))
            self._fit(sample_of, stages, driver)
        self._chain = chain
        self._executor = Executor(stages, self.plan, devices_of, driver)
        self._deferred = DeferredBatchNorm(stages if deferred_batch_norm else ())
        self._watch()
        self._train_program = self._executor.program(self.plan)
        self._predict_program = self._executor.program(self.plan.forward_only())

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
            BaseException: the first exception of a stage, the same object, with a note of where.
                The gradients of that step are then undefined; the next step is not affected.
        """
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
        targets = None if target is None else microbatch.split(target, rows)
        scale, checked = scale_of(scaler, self._executor.end), self._checks.of_losses
        weights = self._weights(rows)
        losses = Losses(self._loss_fn, targets, weights, scale, must_be_finite=checked)
        batch = Batch(call, target, rows, losses, self._levels, self._chain.enter)
        return self._run(self._train_program, batch, losses.total)  # type: ignore[no-any-return]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Forward only, without gradients: the model's output for the whole batch.

        Args:
            *inputs: as for `step`.
            **named: as for `step`.

        Returns:
            What the last layer returns, its tensors joined along dimension 0. One without
            dimensions, such as a loss that the model computes, counts as `reduction` says.
        """
        self._chain.require_unchanged(self._modules)
        batch = self._open_batch((inputs, named))
        merged = self._executor.predict(self._predict_program, *batch)
        self._last_program = self._predict_program
        return merged

    def stream(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """The outputs of batches, each what the pipeline returns for it alone, bit for bit.

        No device waits for the end of a batch: the next are asked for, in the calling thread, and
        under way while the caller has one output. Layers that draw random numbers get their batches
        one by one instead, as in a loop, and so does the first until that is known. Until the
        iterator ends, is left or closed, the pipeline does nothing else; nor may the model change.

        Args:
            batches: of any sizes, perhaps without end: a tensor, a tuple of arguments, or a dict of
                keyword arguments.

        Yields:
            The outputs, in the order of the batches.

        Raises:
            RuntimeError: the pipeline is streaming already, or running a step.
            BaseException: as for `step`, or from `batches`, after the outputs of those before.
        """
        self._chain.require_unchanged(self._modules)
        calls = map(call_of, batches)
        return self._executor.stream(self._predict_program, calls, self._open_batch)

    def _open_batch(self, call: Call) -> tuple[Batch, Outputs]:
        rows = self._rows(call)
        call, _ = self._executor.place(call, None)
        outputs = Outputs(self._weights(rows))
        return Batch(call, None, rows, outputs, (), self._chain.enter), outputs

    def timeline(self, ago: int = 0) -> Timeline:
        """What ran when in the last step or forward; on GPUs, in the last that was traced.

        Args:
            ago: how many steps, or forwards, before the last one. CPU workers keep the last eight,
                GPUs one.

        Raises:
            RuntimeError: nothing has run yet, or on GPUs, nothing within `tracing()`.
            IndexError: that step is not kept.
        """
        if self._last_program is None:
            raise RuntimeError("there is no timeline yet: call step or the pipeline itself first")
        return self._executor.timeline(self._last_program, ago)

    def copies(self) -> Timeline:
        """When each copy between GPUs ran in the last step that was traced.

        Returns:
            A row for each copy stream, in the time of `timeline()`; no rows on CPU workers, where
            nothing is copied.

        Raises:
            RuntimeError: nothing has run yet, or on GPUs, nothing within `tracing()`.
        """
        if self._last_program is None:
            raise RuntimeError("there are no copies yet: call step or the pipeline itself first")
        return self._executor.copies(self._last_program)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within it, steps on GPUs are timed. On CPU workers all are.

        Timing a step waits for everything before it, and its events take time of their own.
        """
        self._executor.traced = True
        try:
            yield
        finally:
            self._executor.traced = False

    def costs(self) -> Costs:
        """What the last step cost: the mean times of each stage's actions by kind.

        On GPUs also of the copies between each two stages. Plans can be compared, and searched
        (`pykern.search.auto`), with them.
        """
        return mean_costs(self.timeline(), self.copies(), self.plan.num_stages)

    def prediction(self) -> Timeline:
        """The simulator's timeline for the last step, from its `costs`."""
        forward_only = self._last_program is self._predict_program
        return simulate(self.plan.forward_only() if forward_only else self.plan, self.costs())

    def close(self) -> None:
        """Ends the worker threads, or gives back GPU memory; the layers stay usable.

        Happens by itself at exit.
        """
        self._executor.close()
        self._deferred.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Pipeline cannot be copied or pickled, for it holds threads or streams; save its "
            "state_dict, or copy the layers and make another Pipeline"
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _adopt(self, chain: Chain | RecordedChain) -> None:
        """Takes the names and modes of the model."""
        root = nn.Module() if chain.root is None else chain.root
        named = chain.layers if chain.root is None else {**vars(root)["_modules"]}
        for name in (*named, *root._parameters, *root._buffers):
            if hasattr(self, name):
                raise ValueError(
                    f"a layer cannot be named {name!r}: Pipeline uses that name itself"
                )
        if chain.root is None:
            for name, layer in named.items():
                self.add_module(name, layer)
            self.training = any(layer.training for layer in named.values())
        else:
            # The same dictionaries, so that whatever is set in the model is set here.
            for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                vars(self)[held] = vars(root)[held]
            self.training = root.training

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the model."""
        if self._chain.root is not None:
            self._chain.root.train(mode)
        return super().train(mode)

    def _watch(self) -> None:
        """Has what looks at steps look at them."""
        self._executor.watch(self._checks.around)
        self._chain.before_recording(self._executor.settle)
        self._executor.watch(self._deferred.around, self._deferred.during)

    def _fit(self, budget: Budget, stages: Sequence[Stage], driver: Driver) -> None:
        try:
            self.fitted = budget.fit(self.plan, stages, self._loss_fn)
        except BaseException:
            driver.close()
            raise
        self.plan, self._levels = self.fitted.plan, cast("Levels", self.fitted.by_microbatch())

    def _rows(self, batch: Any) -> list[int]:
        return microbatch.sizes(microbatch.batch_size(batch), self.plan.num_microbatches)

    def _weights(self, rows: Sequence[int]) -> list[float]:
        if self._reduction == "sum":
            return [1.0] * len(rows)
        total = sum(rows)
        return [n / total for n in rows]

    def _run(self, program: Program, batch: Batch, result: Callable[[], Any] = lambda: None) -> Any:
        found = self._executor.run(program, batch, result)
        self._last_program = program
        return found


def _stages(
    modules: Sequence[nn.Module], cut: Partition, homes: Sequence[torch.device]
) -> list[Stage]:
    return [
        Stage(index, modules[span.start : span.stop], home)
        for index, (span, home) in enumerate(zip(cut.stages, homes, strict=True))
    ]
