"""Forks during a step: for whom a fork waits, and what a child can do."""

import sys

import pytest

from tests.runtime.test_exit import run_python

pytestmark = pytest.mark.forks

PRELUDE = """
    def forked(child):
        # Gives what child() returned in a child of its own; a child that hangs gives -14.
        number = os.fork()
        if number == 0:
            signal.alarm(40)
            os._exit(child())
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

    def make_pipeline():
        try:
            with pykern.Pipeline([Slow(), Slow()], devices="cpu:2", microbatches=4) as own:
                return 0 if torch.equal(own(x), 4 * x) else 2
        except RuntimeError as error:
            return 3 if "was forked while a step ran in another thread" in str(error) else 4

    class Calls(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            self.function()
            return x * 2

    def beside(function, *args):
        thread = threading.Thread(target=function, args=args, daemon=True)
        thread.start()
        return thread

    lock, inside = threading.Lock(), threading.Event()
    def hold():
        with lock:
            inside.set()
            time.sleep(0.3)
"""


def run_forks(code: str) -> None:
    result = run_python(f"{PRELUDE}\n{code}")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_fork_waits_for_actions_and_for_the_rest_of_a_step() -> None:
    """Otherwise locks of the step stay locked in the child."""
    run_forks(
        """
    class Holds(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if threading.current_thread() is thread and not inside.is_set():
                hold()
            return function(*args, **(kwargs or {}))

    def step():
        with Holds():
            pipe(x)

    acts = pykern.Pipeline([Calls(hold), Slow()], devices="cpu:2", microbatches=1)
    for run in (step, lambda: acts(x)):
        thread = threading.Thread(target=run)
        thread.start()
        assert inside.wait(30)
        assert forked(lambda: 1 if lock.locked() else make_pipeline()) == 0
        thread.join()
        inside.clear()
    """
    )


def test_a_child_is_refused_if_the_fork_could_not_wait() -> None:
    """The action waits for the end of the fork. Later forks are not affected.

    Nor do they wait for an action that a pipeline has given up.
    """
    run_forks(
        """
    over = threading.Event()
    def wait():
        inside.set()
        assert over.wait(60)
    pipe = pykern.Pipeline([Calls(wait), Slow()], devices="cpu:2", microbatches=1)
    found = []
    thread = beside(lambda: found.append(pipe(x)))
    assert inside.wait(30)
    assert forked(make_pipeline) == 3
    over.set()
    thread.join()
    assert torch.equal(found[0], 4 * x)
    assert forked(make_pipeline) == 0

    over.clear()
    options = {"devices": "cpu:2", "microbatches": 1, "timeout": 0.1}
    stalls = pykern.Pipeline([Calls(lambda: over.wait(60)), Slow()], **options)
    try:
        stalls(x)
    except pykern.PipelineStalled:
        assert forked(make_pipeline) == 0
        over.set()
    assert over.is_set()
    """
    )


def test_forks_do_not_wait_for_each_other() -> None:
    """Nor does an action wait for itself, or for an action that waits for the next step within."""
    run_forks(
        """
    both, statuses = threading.Barrier(2), []
    def fork():
        both.wait(30)
        statuses.append(forked(make_pipeline))
    def nested():
        with pykern.Pipeline([Calls(fork), Slow()], devices="cpu:2", microbatches=1) as inner:
            inner(x)
    options = {"devices": "cpu:2", "microbatches": 1}
    one = pykern.Pipeline([Slow(), Calls(fork)], **options)
    two = pykern.Pipeline([Calls(nested), Slow()], **options)
    threads = [beside(one, x), beside(two, x)]
    for thread in threads:
        thread.join()
    assert statuses == [0, 0], statuses
    """
    )


def test_a_stream_goes_on_beside_forks() -> None:
    run_forks(
        """
    os.environ["SLOW"] = "0.002"
    for y in pipe.stream([x] * 12):
        assert torch.equal(y, 4 * x)
        assert forked(lambda: 0) == 0
    assert forked(make_pipeline) == 0
    """
    )


def test_a_child_works_that_is_forked_while_its_parent_closes_pipelines_at_its_end() -> None:
    """The child took the end of the parent for its own, and stayed in its first step for ever."""
    result = run_python(
        """
    stepped = threading.Event()
    def fork():
        pipe(x)
        stepped.set()
        ends.wait()
        # The end waits half a second for a thread that has run a step.
        time.sleep(0.1)
        if os.fork() == 0:
            signal.alarm(40)
            with pykern.Pipeline([Slow(), Slow()], devices="cpu:2", microbatches=4) as own:
                print(torch.equal(own(x), 4 * x), flush=True)
            os._exit(0)
        time.sleep(60)
    threading.Thread(target=fork, daemon=True).start()
    stepped.wait()
    """,
        # The handler that is registered first is called last.
        before="import atexit, threading; ends = threading.Event(); atexit.register(ends.set)",
    )
    # Its first releases refuse every fork at the end of a process; other Pythons do not.
    if sys.version_info[:2] == (3, 12) and "can't fork at interpreter shutdown" in result.stderr:
        pytest.skip("this release of Python 3.12 does not fork while it ends")
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")


@pytest.mark.nightly
def test_children_that_are_forked_during_first_steps_make_pipelines() -> None:
    """The first steps of a process import modules, and C++ makes its values.

    Each round is a process that has not yet run a step.
    """
    run_forks(
        """
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(3)]
    options = {"devices": "cpu:3", "microbatches": 4, "loss_fn": nn.functional.mse_loss}
    x = torch.ones(16, 64)
    def train():
        own = pykern.Pipeline(layers, **options)
        for _ in range(2):
            own.step(x, target=x)
        return 0
    def round(number):
        own = pykern.Pipeline(layers, **options)
        thread = beside(lambda: [own.step(x, target=x) for _ in range(20)])
        time.sleep(0.002 * number)
        status = forked(train)
        thread.join()
        return status
    pipe.close()
    statuses = [forked(lambda: round(number)) for number in range(40)]
    assert statuses == [0] * 40, statuses
    """
    )
