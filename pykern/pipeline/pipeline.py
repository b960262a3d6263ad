"""Pipeline: a model cut into stages, a plan for them, and the workers that run it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from ..budget.budget import Budget
from ..budget.fit import Fitted
from ..modes import as_before
from ..parallel.data.data import DataParallel
from ..parallel.peers.groups import Peers
from ..parallel.tensor.tensor import TensorParallelism
from ..partition.balance import Balance
from ..partition.split_points import SplitAt
from ..profiling import Report
from ..runtime.devices import Devices
from ..runtime.features.finite import CheckFinite
from ..runtime.gpu.capture.policy import Capture
from ..runtime.gpu.issuing import Issuing
from ..runtime.loss import Loss
from ..verify import Verify
from .arguments import Arguments
from .build import build
from .choose_levels import RecomputeArgument
from .choose_plan import Schedule
from .combinations import OUTSIDE, refused_with
from .designer import design_of
from .memory import MemoryReport, memory_of
from .profiled import other_plans, profile
from .request import Compile, Request
from .steps import Steps
from .tuned import with_tuned
from .with_graph import WithGraph


class Pipeline(Steps):
    """A model that trains and predicts on several devices at once.

    It is an `nn.Module` with the parameters, buffers, `state_dict` names and modes of the model it
    was made from; the layers are shared, not copied.

    Args:
        model: an `nn.Sequential` or a list of modules, called one after another: the first may take
            several arguments, every other takes the output of the module before it. Or any module
            with a forward of its own, which is recorded on the `sample` and cut (`pykern.trace`).
        devices: "cpu:4" for four CPU workers, "cuda" for every GPU, "cuda:0/4" for four groups of
            the SMs of one GPU, or a list with one name per device. Layers are moved to the GPU of
            their stage. In a list, `pykern.Device("cuda:1", speed=0.6, memory="24GiB")` is a slower
            or smaller one; stages are cut so that all take equal time and fit.
        schedule: a name or function of `pykern.schedules`, a `Plan`, or "auto" for the best that
            `pykern.search.auto` finds: without `loss_fn` and `memory=`, for a loss outside.
        microbatches: how many parts each batch is cut into; may be left out with a `Plan`.
        replicas: how many copies of the model run side by side, each on as many of the devices,
            in their order, and on every so many-th microbatch. The schedule, or `Plan`, is for one
            of them. All see one set of parameters; their gradients are summed in the step.
        loss_fn: called with (output, target) of a microbatch, or (output) when `step` gets no
            target; returns a tensor without dimensions. It runs in the last stage, and may train
            parameters of its own or of that stage. If it uses parameters of other stages, the
            order of their gradient sums is not deterministic.
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
        issue: on GPUs, "caller" has the caller of a step call its actions, one after another;
            "threads" has a thread for each device call the actions of the device, at the same time
            as far as the interpreter lock allows. Hooks and layers then run on these threads.
        recompute: what a forward keeps for its backward. A level for all stages: "none", "ops" or
            "ops+stash" for what pykern's kernels keep, "layer" or "stage" to keep inputs only and
            compute the rest once more, in an action of its own (R); or a list with an entry for
            each stage, which is a level, None, or a list of these with an entry for each
            microbatch; or a `Budget`, which chooses. `fitted` then says what was chosen. An R of
            the last stage calls `loss_fn` once more.
        check_finite: what must be finite, or a FloatingPointError says which tensor of which stage
            and microbatch is not: "loss", "grads" (also the parameters' gradients, after each
            microbatch; left to the scaler where `step` gets one) or "activations" (also the batch
            and what layers return, but for -inf in masks). On GPUs each look waits for what it
            looks at.
        deferred_batch_norm: whether running statistics of batch normalisation move once in a step,
            by those of the full batch, not once for each microbatch. A step that fails leaves them.
        process_group: of processes that each have such a pipeline and train one model with batches
            of their own; or a mesh of one dimension. Losses and gradients are those of all
            processes' rows. A stage's gradients are on their way as soon as they are complete.
        tensor_parallel: (mesh, styles): the processes of a mesh of one dimension each run their
            shards of every stage, for the same batches. Styles are by name of a module, as torch's
            `parallelize_module` takes them; parameters of these become DTensors, new objects.
        verify: whether the first step also runs the plain model and compares loss, gradients and
            buffers. True verifies the first step, a number n also every n-th step after it. A
            `Verify` sets tolerances too. See docs/verify.md.
        timeout: seconds that an action may take; None for no limit. After that time the step or
            stream raises `PipelineStalled`, and the pipeline is closed. On CPU workers the limit is
            checked every 20 ms, outside of actions. Where a call in C keeps the interpreter lock
            for that long, a message on stderr says so. On GPUs the limit is for copies too, the
            report comes on stderr, and the next call raises the error (docs/gpus.md).
        tuned: a file that `Choice.save` of `pykern.tune` has written, for schedule, microbatches,
            replicas, cut, recompute and, where they are left out, devices.
        compile: "stages" has torch.compile make one function of the layers of each stage, when it
            first runs. The numbers are those of the compiled code: alike in every step, and others
            than the plain model's in their last bits. See docs/training-loops.md.
        **options: for the schedule, e.g. `waves=2`; for "auto" e.g. `memory=0.5`.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing has been started.
        PeerError: another process's pipeline differs, or has not been made in time.
        PlanError: the plan cannot run.
    """

    # The levels that a `Budget` has chosen, and the optimizer of an `AsyncPipeline`.
    fitted: Fitted | None = None
    optimizer: Optimizer | None = None

    def __init__(  # noqa: PLR0913 - all that a pipeline is made of, by keyword
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        devices: Devices | None = None,
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
        issue: Issuing = "caller",
        recompute: RecomputeArgument | Budget = None,
        check_finite: CheckFinite = "off",
        deferred_batch_norm: bool = False,
        process_group: Peers | None = None,
        tensor_parallel: TensorParallelism | None = None,
        verify: bool | int | Verify = False,
        timeout: float | None = None,
        tuned: str | os.PathLike[str] | None = None,
        compile: Compile = False,
        **options: Any,
    ) -> None:
        arguments = {
            "model": model,
            "devices": devices,
            "schedule": schedule,
            "microbatches": microbatches,
            "replicas": replicas,
            "loss_fn": loss_fn,
            "reduction": reduction,
            "balance": balance,
            "sample": sample,
            "split_at": split_at,
            "whole": whole,
            "capture": capture,
            "recompute": recompute,
            "check_finite": check_finite,
            "deferred_batch_norm": deferred_batch_norm,
            "process_group": process_group,
            "tensor_parallel": tensor_parallel,
            "verify": verify,
            "timeout": timeout,
            "issue": issue,
            "compile": compile,
            "options": options,
        }
        self._open(Request(**with_tuned(tuned, arguments)))

    def _open(self, asked: Request) -> None:
        """Makes all parts of the pipeline."""
        super().__init__()
        with as_before():
            chosen = design_of(asked)
            self.plan, self.partition = chosen.plan, chosen.partition
            self._reduction = asked.reduction
            self._adopt(chosen.chain, asked.loss_fn)
            self._arguments = Arguments(chosen.chain, asked.loss_fn)
            built = build(chosen, self)
            self.plan, self._levels, self.fitted = built.plan, built.levels, built.fitted
            self._executor, self._steps = built.executor, built.runner
            self._features = built.features
            self.optimizer, self._data = built.optimizer, built.features.find(DataParallel)
            self._train_program = self._executor.driver.program(self.plan)
            self._predict_program = self._executor.driver.program(self.plan.forward_only())
            refused = refused_with(OUTSIDE, asked, self.plan)
            self._with_graph = WithGraph(self._executor, self.plan, self._levels, refused)
            self._map_refused = refused_with("a loss of a call", asked, self.plan)
            self._profile_refused = refused_with("a profile", asked, self.plan)
            self._make_plan = other_plans(asked)

    def profile(self, *inputs: Any, target: Any = None, steps: int = 5, **named: Any) -> Report:
        """Runs some steps, and reports why they take their time and what would shorten them.

        Gradients, random numbers and the state of layers are afterwards as before; hooks of
        parameters run.
        Beside the steps, layers run alone and microbatches without values, so that effects of the
        cut, of devices and of short actions can be told apart. With a `process_group`, all
        processes must call it.

        Args:
            *inputs: as for `step`.
            target: as for `step`.
            steps: the number of steps; two more warm up. If torch has several threads, CPU workers
                run as many steps again with one thread.
            **named: as for `step`.

        Returns:
            The report. Its string has all tables; `save_html` and `save_trace` write files.

        Raises:
            ValueError: an option of the pipeline does not support `profile`; the message names it.
            BaseException: as for `step`.
        """
        if self._profile_refused is not None:
            raise ValueError(self._profile_refused)
        return profile(self, Pipeline, self._make_plan, (inputs, named), target, steps)

    def memory(
        self,
        *inputs: Any,
        target: Any = None,
        optimizer: Optimizer | None = None,
        **named: Any,
    ) -> MemoryReport:
        """The bytes that each device holds: parameters, gradients, activations and more.

        With a batch, one microbatch of it runs through the stages to predict activations.
        Gradients, random numbers and the state of layers are afterwards as before.

        Args:
            *inputs: as for `step`; without them, activations are unknown.
            target: as for `step`.
            optimizer: the optimizer of the pipeline's parameters, for the bytes of its state; an
                `AsyncPipeline` has its own.
            **named: as for `step`.

        Returns:
            The bytes by device. All that is not known is None, with the reason in `unknown`.

        Raises:
            BaseException: as for `step`.
        """
        call = inputs, named
        known = self.optimizer if optimizer is None else optimizer
        can_predict = self._profile_refused is None
        return memory_of(self, call, target, known, can_predict=can_predict)
