"""The schedules that help texts offer are those that commands run."""

import pytest

from pykern.cli.sources import TRAINED
from pykern.pipeline.choose_plan import require_runnable
from pykern.plan import Kind
from pykern.schedules import by_name


@pytest.mark.parametrize("name", by_name)
def test_schedules_are_offered_for_training_if_they_can_train(name: str) -> None:
    plan = by_name[name](4, 8)
    try:
        require_runnable(plan)
        trains = plan.has(Kind.B) or plan.has(Kind.I)
    except ValueError:
        trains = False
    assert (name in TRAINED) == trains
