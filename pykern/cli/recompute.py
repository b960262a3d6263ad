"""`pykern plan --recompute`: a plan with cells of some stages recomputed, and one without."""

from ..plan import Action, Costs, Kind, Memory, Plan, simulate, with_recompute
from .memory import numbers, peaks_in_shares
from .sources import Costed, require_stages
from .values import Stages


def recomputed(costed: Costed, stages: Stages, memory: float | None) -> Costed:
    """With an R for every microbatch of these stages that has a use for one.

    Args:
        costed: Its plan holds no R of these stages; R goes where, with its costs, a device waits.
        stages: Which, or all.
        memory: Cap in 1F1B's, which is as many activations of a device's share as there are
            devices; or None, as little as lets the step end early. Inputs count nothing.

    Returns:
        The same with another plan, and the former one.

    Raises:
        ValueError: The plan lacks a stage, has no backwards, or cannot be recomputed.
    """
    source, plan = costed.source, costed.source.plan
    require_stages("--recompute", stages, source)
    trained = range(plan.first_trained, plan.num_stages) or range(plan.num_stages)
    chosen = trained if stages.numbers is None else stages.numbers
    cells = [Action(Kind.R, s, m) for s in chosen for m in range(plan.num_microbatches)]
    if memory is None:
        smaller = with_recompute(plan, cells, costed.costs)
    else:
        share = Memory(plan.num_devices / plan.num_stages)
        cap = memory * plan.num_devices
        smaller = with_recompute(plan, cells, costed.costs, share, cap)
    return costed._replace(source=source._replace(plan=smaller), former=plan)


def without_in_words(plan: Plan, costs: Costs) -> str:
    """A line about the plan before R was added."""
    from ..plan.drawing.words import measures

    peaks = numbers(peaks_in_shares(plan))
    return f"without recompute: {measures(simulate(plan, costs))}, peak memory {peaks}"
