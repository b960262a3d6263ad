"""The bubble rates of the zero-bubble paper's Table 5 from the profiles of its Table 6.

Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, 2023, arXiv 2401.10241. The numbers are also
in the script that computed them, `efficiency.py` on the branch `arxiv` of the authors' repository.
A rate is 1 - M * (F + B + W) / cost. For 1F1B and ZB-H1 the cost is the makespan, for ZB-H2 the
span.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pykern import schedules
from pykern.plan import Action, Costs, Kind, Plan, Timeline, simulate


@dataclass(frozen=True)
class Profile:
    """The times of one device's share, for one microbatch: the paper's F, B and W are our F, I and
    W."""

    rates: dict[str, str]
    num_devices: int
    num_microbatches: int
    forward_ns: int
    input_ns: int
    weight_ns: int
    transfer_ns: int

    def work_ns(self) -> int:
        return self.num_microbatches * (self.forward_ns + self.input_ns + self.weight_ns)

    def costs(self, num_chunks: int = 1) -> Costs:
        return Costs(
            self.forward_ns / num_chunks,
            (self.input_ns + self.weight_ns) / num_chunks,
            self.transfer_ns,
            input_ns=self.input_ns / num_chunks,
            weight_ns=self.weight_ns / num_chunks,
        )

    def rate(self, cost_ns: float) -> str:
        return f"{1 - self.work_ns() / cost_ns:.4f}"


_NAMES = ("one_f_one_b", "zb_h1", "zb_h2")
_TABLE = """
 8  24 18522 18086  9337 601 .2431 .1585 .1083
 8  32 18513 18086  9331 626 .1985 .1242 .0837
 8  64 18546 18097  9321 762 .1240 .0674 .0444
 8  24 29718 29444 19927 527 .2347 .1323 .0698
 8  32 29802 29428 19530 577 .1898 .1045 .0559
 8  64 29935 29621 19388 535 .1091 .0554 .0294
16  48 11347 11248  8132 377 .2552 .1397 .0672
16  64 11307 11254  8101 379 .2082 .1088 .0516
16 128 11325 11308  8109 378 .1251 .0576 .0266
32  96 10419 10207  7715 408 .2646 .1421 .0641
32 128 10408 10204  7703 408 .2168 .1106 .0490
32 256 10402 10248  7698 460 .1352 .0594 .0257
"""


def _profile(line: str) -> Profile:
    fields = line.split()
    numbers = [int(field) for field in fields[:6]]
    rates = (f"0{field}" for field in fields[6:])
    return Profile(dict(zip(_NAMES, rates, strict=True)), *numbers)


PROFILES = [_profile(line) for line in _TABLE.strip().splitlines()]
COST: dict[str, Callable[[Timeline], float]] = {
    "one_f_one_b": lambda timeline: timeline.makespan_ns,
    "zb_h1": lambda timeline: timeline.makespan_ns,
    "zb_h2": lambda timeline: timeline.span_ns,
}


@pytest.mark.parametrize("name", [name for name in _NAMES if name in schedules.by_name])
@pytest.mark.parametrize("profile", PROFILES)
def test_rates_to_four_decimals(profile: Profile, name: str) -> None:
    plan = schedules.by_name[name](profile.num_devices, profile.num_microbatches)
    timeline = simulate(plan, profile.costs())
    assert profile.rate(COST[name](timeline)) == profile.rates[name]


def _relaxed_makespan(plan: Plan, costs: Costs) -> float:
    """As the authors' script has it: only the first microbatch of a group of P waits for the turn.

    A stage on the first device waits for the last device's only where m mod P is 0, and likewise
    backwards on the last device.
    """
    assert isinstance(costs.forward_ns, float)
    assert isinstance(costs.backward_ns, float)
    num_devices, last_stage = plan.num_devices, plan.num_stages - 1
    ends: dict[Action, float] = {}
    free = [0.0] * num_devices
    left = [list(reversed(row)) for row in plan.rows]
    while any(left):
        for device, row in enumerate(left):
            while row:
                action = row[-1]
                forward = action.kind is Kind.F
                source = action.stage + (-1 if forward else 1)
                turn = device == (0 if forward else num_devices - 1)
                start = free[device]
                if 0 <= source <= last_stage and not (turn and action.microbatch % num_devices):
                    needed = Action(action.kind, source, action.microbatch)
                    if needed not in ends:
                        break
                    start = max(start, ends[needed] + costs.transfer_ns)
                free[device] = start + (costs.forward_ns if forward else costs.backward_ns)
                ends[row.pop()] = free[device]
    return max(free)


# The chunks are the layers of a device. The table prints no more of this column that we could read.
@pytest.mark.parametrize(
    ("profile", "num_chunks", "printed"),
    [(PROFILES[0], 3, "0.1055"), (PROFILES[5], 4, "0.0320"), (PROFILES[9], 2, "0.1493")],
)
def test_interleaved_differs_by_the_transfers_that_the_paper_leaves_out(
    profile: Profile, num_chunks: int, printed: str
) -> None:
    num_devices = profile.num_devices
    plan = schedules.interleaved(num_devices, profile.num_microbatches, num_chunks)
    costs = profile.costs(num_chunks)
    relaxed_ns = _relaxed_makespan(plan, costs)
    assert profile.rate(relaxed_ns) == printed
    left_out_ns = num_devices * profile.transfer_ns
    assert simulate(plan, costs).makespan_ns == pytest.approx(relaxed_ns + left_out_ns, rel=1e-12)
