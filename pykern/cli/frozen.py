"""`pykern plan --frozen`: a plan for a model of which some stages have nothing to train."""

from ..plan import costs_with_frozen
from .sources import Costed, require_stages
from .values import Stages


def with_frozen(costed: Costed, stages: Stages) -> Costed:
    """With these stages frozen, in the plan and in what its actions take.

    Raises:
        ValueError: The plan lacks a stage, or no stage is left to train.
    """
    source, plan = costed.source, costed.source.plan
    require_stages("--frozen", stages, source)
    numbers = range(plan.num_stages) if stages.numbers is None else stages.numbers
    return costed._replace(
        source=source._replace(plan=plan.with_frozen(list(numbers))),
        costs=costs_with_frozen(costed.costs, plan.num_stages, numbers),
    )
