"""A step as one graph, from Python: made once, launched once a step, remade when it has changed."""

import gc
from collections.abc import Iterator

import pytest

from pykern import _C
from pykern.plan import Action, Kind
from pykern.schedules import one_f_one_b
from tests.fake_cuda.fake import FakeCuda

PLAN = one_f_one_b(2, 3)
ACTIONS = [action for row in PLAN.rows for action in row]
OUT_OF_MEMORY = 2


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    driver = FakeCuda(num_devices=2)
    yield driver
    gc.collect()
    driver.close()
    assert driver.violations == []
    assert driver.leaks == []


class Whole:
    """A program of graphs that say when they run, and what launches it."""

    def __init__(self, fake: FakeCuda) -> None:
        self.ran: list[Action] = []
        self.program = _C.StreamProgram(PLAN, _C.Lanes([(0, 0, 1), (1, 0, 1)]))
        self.executor = _C.StreamExecutor()
        self.callers = {gpu: fake.stream(gpu) for gpu in range(2)}
        self._fake = fake

    def launch(self, action: Action) -> None:
        # Not this object, which would then live as long as the driver.
        ran = self.ran
        graph = self._fake.graph(lambda: ran.append(action))
        self.program.set_launch(action, 0, graph, [], [])

    def run(self) -> list[Action]:
        self._fake.begin_step()
        self.ran.clear()
        with self.executor.claim():
            self.executor.run_whole(self.program, self.callers)
        self._fake.run_all()
        return list(self.ran)


def whole_of(fake: FakeCuda) -> Whole:
    made = Whole(fake)
    for action in ACTIONS:
        made.launch(action)
    return made


def test_a_step_is_one_launch_of_one_graph(fake: FakeCuda) -> None:
    whole = whole_of(fake)
    for _ in range(3):
        ran = whole.run()
        assert sorted(map(str, ran)) == sorted(map(str, ACTIONS))
        for row in PLAN.rows:
            assert [action for action in ran if action in row] == list(row)
        for microbatch in range(3):
            kinds = [(Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0)]
            of_one = [Action(kind, stage, microbatch) for kind, stage in kinds]
            assert [action for action in ran if action.microbatch == microbatch] == of_one
    assert fake.calls("cuGraphInstantiateWithFlags") == 1
    assert fake.calls("cuGraphLaunch") == 3


def test_it_is_made_again_when_something_has_changed(fake: FakeCuda) -> None:
    whole = whole_of(fake)
    whole.run()
    whole.program.set_transfers(Action(Kind.COPY_F, 0, 1), [])
    whole.run()
    assert fake.calls("cuGraphInstantiateWithFlags") == 2
    whole.launch(ACTIONS[0])
    assert len(whole.run()) == len(ACTIONS)
    assert fake.calls("cuGraphInstantiateWithFlags") == 3


def test_an_action_without_a_launch_is_named(fake: FakeCuda) -> None:
    whole = Whole(fake)
    for action in ACTIONS[1:]:
        whole.launch(action)
    with pytest.raises(
        ValueError,
        match="all actions must have launches for a graph of a whole step, got none for 0F0",
    ):
        whole.run()
    assert fake.calls("cuGraphLaunch") == 0
    whole.launch(ACTIONS[0])
    assert len(whole.run()) == len(ACTIONS)


def test_a_driver_that_refuses_is_told_and_the_next_step_is_right(fake: FakeCuda) -> None:
    whole = whole_of(fake)
    fake.fail("cuGraphInstantiateWithFlags", 1, OUT_OF_MEMORY)
    with pytest.raises(_C.CudaError, match="cuGraphInstantiateWithFlags"):
        whole.run()
    fake.fail("cuGraphLaunch", 1, OUT_OF_MEMORY)
    with pytest.raises(_C.CudaError, match="cuGraphLaunch"):
        whole.run()
    assert len(whole.run()) == len(ACTIONS)


def test_who_has_no_claim_runs_nothing(fake: FakeCuda) -> None:
    whole = whole_of(fake)
    with pytest.raises(RuntimeError, match="run_whole needs a claim"):
        whole.executor.run_whole(whole.program, whole.callers)
    assert whole.ran == []
