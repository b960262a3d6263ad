"""The benchmarks of tuning run: both compare what they are about, at sizes of no meaning."""

import pytest

from . import predicted, tuning


def test_predicted_steps_beside_measured_ones(smoke: bool) -> None:
    if not smoke:
        return  # its figures are for `python -m bench.predicted`, with a table of its own
    found = list(predicted.results(2, smoke=True, on=[4]))
    assert [one["devices"] for one in found] == [4, 4]
    assert all(predicted.error(one) >= 0 for one in found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", tuning.SUBJECTS)
def test_the_choice_beside_every_plan(model: str, smoke: bool) -> None:
    if not smoke:
        return  # likewise, `python -m bench.tuning`
    found = tuning.compared(model, smoke=True)
    assert found["plans"] == 6
    assert found["chosen_ms"] > 0
