"""Costs: what is not given, what is refused, and that they are values."""

import math
import pickle
from collections.abc import Callable

import pytest

from pykern.plan import Costs, Memory


def test_what_is_not_given() -> None:
    costs = Costs([2, 4], 6)
    assert (costs.recompute_ns, costs.input_ns, costs.weight_ns) == ([2, 4], 3, 3)
    assert (costs.transfer_ns, costs.update_ns, costs.reduce_ns, costs.overhead_ns) == (0, 0, 0, 0)
    assert (costs.message_bytes, costs.bandwidth, costs.shared_links) == (0, math.inf, False)
    assert (costs.overlap, costs.device_speeds) == (0, 1)
    assert Costs(1, [2, 4]).weight_ns == [1, 2]


def full_costs() -> Costs:
    return Costs(
        [1, 2],
        [3, 4],
        0.5,
        recompute_ns=5,
        input_ns=[6, 7],
        weight_ns=8,
        update_ns=9,
        reduce_ns=[10, 11],
        overhead_ns=12,
        message_bytes=13,
        bandwidth=14,
        shared_links=True,
        overlap=0.25,
        device_speeds=[15, 16],
    )


def test_equality_pickle_and_text() -> None:
    costs = full_costs()
    assert pickle.loads(pickle.dumps(costs)) == costs
    assert costs != Costs([1, 2], [3, 4], 0.5)
    assert eval(repr(costs)) == costs
    assert repr(Costs(1, 2)).startswith("Costs(forward_ns=1.0, backward_ns=2.0, transfer_ns=0.0, ")


def test_memory_is_a_value_too() -> None:
    memory = Memory([4, 5], 2, 1, 3)
    assert pickle.loads(pickle.dumps(memory)) == memory == Memory([4, 5], 2, 1, 3)
    assert memory != Memory([4, 5], 2, 1)
    assert eval(repr(memory)) == memory
    alike = Memory([4, 5])
    assert alike.kept_bytes == alike.rebuilt_bytes == [4, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs(-1, 1), "forward_ns must be finite and not negative, got -1"),
        (lambda: Costs(1, 1, math.nan), "transfer_ns must be finite and not negative, got nan"),
        (lambda: Costs(1, math.inf), "backward_ns must be finite and not negative, got inf"),
        (lambda: Costs(1, [1, math.inf]), "backward_ns of stage 1 must be finite"),
        (lambda: Costs(1, 1, -0.5), "transfer_ns must be finite and not negative, got -0.5"),
        (lambda: Costs(1, 1, recompute_ns=-1), "recompute_ns must be finite"),
        (lambda: Costs(1, 1, input_ns=-1), "input_ns must be finite"),
        (lambda: Costs(1, 1, weight_ns=-1), "weight_ns must be finite"),
        (lambda: Costs(1, 1, update_ns=-1), "update_ns must be finite"),
        (lambda: Costs(1, 1, reduce_ns=-1), "reduce_ns must be finite"),
        (lambda: Costs(1, 1, overhead_ns=math.inf), "overhead_ns must be finite"),
        (lambda: Costs(1, 1, message_bytes=[0, -1]), "message_bytes of stage 1 must be finite"),
        (lambda: Costs(1, 1, bandwidth=0), "bandwidth must be positive, got 0"),
        (lambda: Costs(1, 1, bandwidth=math.nan), "bandwidth must be positive, got nan"),
        (lambda: Costs(1, 1, overlap=1.5), "overlap must be 0 to 1, got 1.5"),
        (lambda: Costs(1, 1, overlap=math.nan), "overlap must be 0 to 1, got nan"),
        (lambda: Costs(1, 1, device_speeds=0), "device_speeds must be finite and positive, got 0"),
        (
            lambda: Costs(1, 1, device_speeds=[1, math.inf]),
            "device_speeds of device 1 must be finite and positive, got inf",
        ),
    ],
)
def test_bad_costs_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_comes_after_the_transfer_is_named() -> None:
    with pytest.raises(TypeError):
        Costs(1, 1, 0, 1)  # type: ignore[call-arg]
