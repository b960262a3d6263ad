"""Random plans that can run, for tests of what is done with plans."""

from hypothesis import strategies as st

from pykern.plan import Action, Kind, Placement, Plan


def chain(num_stages: int, microbatch: int) -> list[Action]:
    """What one microbatch does, in the only order there is."""
    forwards = [Action(Kind.F, stage, microbatch) for stage in range(num_stages)]
    return forwards + [Action(Kind.B, action.stage, microbatch) for action in forwards[::-1]]


@st.composite
def valid_plans(draw: st.DrawFn) -> Plan:
    """Any order of all actions that respects the chains, dealt to any placement."""
    num_devices = draw(st.integers(1, 4))
    devices = draw(st.lists(st.integers(0, num_devices - 1), min_size=1, max_size=6))
    num_microbatches = draw(st.integers(1, 4))
    steps = [m for m in range(num_microbatches) for _ in range(2 * len(devices))]
    chains = [chain(len(devices), m)[::-1] for m in range(num_microbatches)]
    rows: list[list[Action]] = [[] for _ in range(num_devices)]
    for microbatch in draw(st.permutations(steps)):
        action = chains[microbatch].pop()
        rows[devices[action.stage]].append(action)
    return Plan(Placement(num_devices, devices), num_microbatches, rows)
