"""The facts about some steps, from which a profile is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..plan import Action, Costs, Kind, Plan, Timeline

# Makes the plan of a schedule by name, None for the present one, with so many microbatches.
OtherPlan = Callable[[str | None, int], Plan]


@dataclass(frozen=True)
class Observed:
    """Steps that have run.

    Attributes:
        plan: the plan of a step.
        timeline: the step of median length.
        costs: the costs of its stages, each the median over the steps.
        step_ns: the median time of a step, as its caller sees it.
        num_steps: the number of steps.
        rows: the number of rows of a batch; None if it is not known.
        tokens_of_row: the number of tokens in a row; None if rows are not rows of integers.
        spans: by stage, the layers.
        layer_names: the names of the layers; empty if they are not known.
        layer_ns: by layer, the time of forward and backward of a microbatch outside of the
            pipeline, the loss included in the last; empty if it was not measured.
        action_ns: by kind, the time of an action beside its layers; empty if it was not measured.
        issue_ns: the time between two actions of a device in a pipeline without work.
        hand_over_ns: the time from an action to one that waits for it elsewhere, likewise.
        one_thread: the step of median length with one torch thread; None if torch had one.
        one_thread_costs: the costs of the stages with one torch thread.
        torch_threads: the number of torch's threads.
        num_cores: the number of cores that the process may use; None where devices are GPUs.
        captures: whether steps may be CUDA graphs; True if it is not known.
        host_waits: the lines at which the host waits for a GPU, such as "model.py:12"; empty if it
            was not looked at.
        core_share: the part of its time that a thread with work had a core, 0 to 1.
        held_bytes: by device, the predicted peak of parameters, gradients and activations.
        held_by_action: by action, how many bytes of activations more its device holds behind it;
            empty if they are not known.
        peak_bytes: by device, the most that torch's allocator has had on its GPU since the process
            began; empty if it was not measured, as on CPU workers.
        flops: the operations of the model's products and attentions in a step, without recompute;
            None if they are not known.
        peak_flops_per_ns: the operations that all devices could do, per nanosecond; None if that is
            not known.
        hidden_copies: the part of the copies between GPUs beside which some device works, 0 to 1;
            None without copies.
        make_plan: makes other plans for the same model.
    """

    plan: Plan
    timeline: Timeline
    costs: Costs
    make_plan: OtherPlan
    step_ns: float = 0.0
    num_steps: int = 1
    rows: int | None = 1
    tokens_of_row: int | None = None
    spans: Sequence[range] = ()
    layer_names: Sequence[str] = ()
    layer_ns: Sequence[float] = ()
    action_ns: Mapping[Kind, float] = field(default_factory=dict)
    issue_ns: float = 0.0
    hand_over_ns: float = 0.0
    one_thread: Timeline | None = None
    one_thread_costs: Costs | None = None
    torch_threads: int = 1
    num_cores: int | None = None
    captures: bool = True
    host_waits: Sequence[str] = ()
    core_share: float = 1.0
    held_bytes: Sequence[float] = ()
    held_by_action: Mapping[Action, float] = field(default_factory=dict)
    peak_bytes: Sequence[int] = ()
    flops: int | None = None
    peak_flops_per_ns: float | None = None
    hidden_copies: float | None = None

    @property
    def quiet(self) -> Timeline:
        """The step without competing threads."""
        return self.timeline if self.one_thread is None else self.one_thread

    @property
    def quiet_costs(self) -> Costs:
        """The costs of the step without competing threads."""
        return self.costs if self.one_thread_costs is None else self.one_thread_costs
