"""Programs of their own with a pipeline: how they end, and what they may do beside it."""

import signal
import subprocess
import textwrap

import pytest

from tests.diagonal import nightly
from tests.support import programs


def run_python(
    code: str, timeout: float = 60, *, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own, with a pipeline of two slow stages named `pipe`.

    `before` comes before the imports of torch and pykern, in a fresh interpreter.
    """
    prelude = """
        import os, re, signal, sys, threading, time, torch, pykern
        from torch import nn
        class Slow(nn.Module):
            def forward(self, x):
                time.sleep(float(os.environ.get("SLOW", "0")))
                return x * 2
        pipe = pykern.Pipeline([Slow(), Slow()], devices="cpu:2", microbatches=4)
        x = torch.ones(4, 2)
    """
    program = "\n".join(map(textwrap.dedent, (before, prelude, code)))
    return programs.run(program, timeout=timeout, fresh=bool(before))


def test_too_many_threads_are_an_error_and_not_the_end() -> None:
    result = run_python(
        """
        import resource
        before = len(os.listdir("/proc/self/task"))
        with open("/proc/self/statm") as pages:
            mapped = int(pages.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 200 * 2**20, resource.RLIM_INFINITY))
        try:
            pykern.Pipeline([Slow() for _ in range(256)], devices="cpu:256", microbatches=1)
        except RuntimeError as error:
            found = re.match(r"each device needs a thread, .* device (\\d+) of 256: ", str(error))
            assert found is not None and int(found[1]) < 256, error
            assert "Use fewer devices" in str(error), error
            assert len(os.listdir("/proc/self/task")) == before
            pipe(x)
            sys.exit(11)
        """
    )
    assert (result.returncode, result.stderr) == (11, "")


EXITS = {
    "before any step": ("", 0),
    "after a step": ("pipe(x)", 0),
    "by sys.exit": ("pipe(x); sys.exit(7)", 7),
    "by os._exit in the middle of a step": (
        "os.environ['SLOW'] = '0.1'; threading.Timer(0.05, os._exit, (5,)).start(); pipe(x)",
        5,
    ),
    "while a daemon thread steps": (
        """
        os.environ["SLOW"] = "0.02"
        def forever():
            try:
                while True: pipe(x)
            except RuntimeError as error:
                assert "closed" in str(error)
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.1)
        """,
        0,
    ),
    "while a daemon thread streams": (
        """
        def forever():
            try:
                for _ in pipe.stream(iter(lambda: x, None)): pass
            except RuntimeError as error:
                assert "closed" in str(error)
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.1)
        """,
        0,
    ),
    # In plain torch such a thread ends the process, where it frees a tensor.
    "while a daemon thread goes on whatever is raised": (
        """
        def forever():
            while True:
                try: [pipe(x).view(-1) + 1 for _ in range(2)]
                except RuntimeError: pass
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.1)
        """,
        0,
    ),
    "while a daemon thread makes pipelines": (
        """
        def forever():
            while True:
                try:
                    with pykern.Pipeline([Slow(), Slow()], devices="cpu:2", microbatches=4) as own:
                        own(x)
                except RuntimeError: pass
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.1)
        """,
        0,
    ),
    "in the middle of a stream": (
        """
        pipe(x)
        stream = pipe.stream(iter(lambda: x, None))
        next(stream), next(stream)
        pipe.myself = [pipe, stream]
        """,
        0,
    ),
    "after an interrupt of a stream, which is kept": (
        """
        os.environ["SLOW"] = "0.01"
        pipe(x)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for _ in pipe.stream(iter(lambda: x, None)): pass
        except KeyboardInterrupt as interrupt:
            kept = interrupt
            sys.exit(7)
        """,
        7,
    ),
    "with a live reference cycle": ("pipe.myself = [pipe]; pipe(x)", 0),
    "closed": ("pipe(x); pipe.close()", 0),
    "after an error": (
        """
        try: pipe("no tensor")
        except pykern.SplitError: pass
        try: pipe(torch.ones(3, 2).int().numpy)
        except pykern.SplitError: pass
        """,
        0,
    ),
}


# Each of these does the same as another test here does before it ends.
AT_NIGHT = {
    "before any step",
    "after a step",
    "by sys.exit",
    "closed",
    "while a daemon thread streams",
    "while a daemon thread makes pipelines",
}


@pytest.mark.parametrize("name", [nightly(name) if name in AT_NIGHT else name for name in EXITS])
def test_the_process_ends_with_its_own_code_and_no_noise(name: str) -> None:
    code, expected = EXITS[name]
    result = run_python(code)
    assert (result.returncode, result.stderr) == (expected, "")


# Handlers of atexit that were registered before the import of pykern, and so run after all others;
# `forever` runs steps.
LATE = {
    "a pipeline": "own(x)",
    "a pipeline in a cycle": "own(x); own.myself = [own]; del globals()['own']",
    "a stream": "own(x); stream = own.stream(iter(lambda: x, None)); next(stream); own.it = stream",
    "a thread": "begin.set(); time.sleep(0.1)",
}


@pytest.mark.parametrize("name", ["a pipeline", "a thread", *map(nightly, list(LATE)[1:3])])
def test_a_pipeline_may_be_made_when_all_others_are_closed(name: str) -> None:
    result = run_python(
        f"""
        begin = threading.Event()
        def forever():
            begin.wait()
            while True:
                try: own(x)
                except RuntimeError: pass
        # Python 3.12 starts no thread in a handler of atexit.
        threading.Thread(target=forever, daemon=True).start()

        def late():
            global own
            try: pipe(x)
            except RuntimeError as error: assert "the pipeline is closed" in str(error), error
            own = pykern.Pipeline([Slow(), Slow()], devices="cpu:2", microbatches=4)
            {LATE[name]}
        """,
        before="import atexit; atexit.register(lambda: late())",
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("times", [1, nightly(3)])
def test_an_interrupt_of_the_end_does_not_abort_it(times: int) -> None:
    """The end waits for an action, which ends once the interrupts have come."""
    result = run_python(
        f"""
        begun, end, handled, come = (threading.Event() for _ in range(4))
        class Waits(nn.Module):
            def forward(self, x):
                begun.set()
                come.wait()
                return x
        pipe = pykern.Pipeline([Waits(), Waits()], devices="cpu:2", microbatches=4)
        def forever():
            while True: pipe(x)
        threading.Thread(target=forever, daemon=True).start()

        def on_interrupt(*_):
            handled.set()
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, on_interrupt)
        def interrupt():
            end.wait()
            time.sleep(0.05)
            for _ in range({times}):
                handled.clear()
                os.kill(os.getpid(), signal.SIGINT)
                handled.wait()
            come.set()
        # Python 3.12 starts no thread in a handler of atexit.
        threading.Thread(target=interrupt, daemon=True).start()
        import atexit
        atexit.register(end.set)
        begun.wait()
        """
    )
    assert result.returncode == 0
    assert result.stderr.count("KeyboardInterrupt") >= 1


def test_the_first_step_does_not_load_the_compiler() -> None:
    result = run_python("pipe(x); sys.exit('torch._dynamo' in sys.modules)")
    assert (result.returncode, result.stderr) == (0, "")


def test_an_uncaught_interrupt_ends_the_process_like_any_other() -> None:
    result = run_python(
        """
        os.environ["SLOW"] = "0.5"
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        pipe(x)
        """
    )
    assert result.returncode == -signal.SIGINT
    assert result.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.forks
def test_a_forked_child_is_told_and_can_make_its_own() -> None:
    result = run_python(
        """
        pipe(x)
        child = os.fork()
        if child == 0:
            try:
                pipe(x)
            except RuntimeError as error:
                assert "made in another process" in str(error), error
                own = pykern.Pipeline([Slow(), Slow()], devices="cpu:2", microbatches=2)
                assert torch.equal(own(x), 4 * x)
                sys.exit(11)
            sys.exit(12)
        status = os.waitpid(child, 0)[1]
        assert torch.equal(pipe(x), 4 * x)
        sys.exit(os.waitstatus_to_exitcode(status))
        """
    )
    assert (result.returncode, result.stderr) == (11, "")


@pytest.mark.forks
def test_data_loader_workers_run_beside_a_pipeline() -> None:
    result = run_python(
        """
        import warnings
        from torch.utils.data import DataLoader, TensorDataset
        # Where the process has one core.
        warnings.filterwarnings("ignore", "This DataLoader will create 2 worker processes")
        data = TensorDataset(torch.arange(64.0).view(32, 2))
        total = 0
        for epoch in range(2):
            for (batch,) in DataLoader(data, batch_size=4, num_workers=2):
                total += pipe(batch).sum()
        assert total == 2 * 4 * 64 * 63 / 2, total
        """
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.forks
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("sys.exit(7)", (7, "")),
        nightly("threading.current_thread(); os._exit(7)", (7, "")),
        nightly("raise ValueError('of the child')", (1, "ValueError: of the child")),
        ("return x", (1, "end the child within the stage, by os._exit")),
    ],
)
def test_a_child_that_is_forked_in_a_stage_ends(way: str, expected: tuple[int, str]) -> None:
    result = run_python(
        f"""
        class Forks(nn.Module):
            def forward(self, x):
                if not children:
                    children.append(os.fork())
                    if children == [0]:
                        {way}
                return x * 2

        children = []
        pipe = pykern.Pipeline([Forks(), Slow()], devices="cpu:2", microbatches=4)
        assert torch.equal(pipe(x), 4 * x)
        assert torch.equal(pipe(x), 4 * x)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
        """
    )
    assert result.returncode == expected[0]
    assert result.stderr.rstrip().endswith(expected[1])
    assert bool(result.stderr) == bool(expected[1])


@pytest.mark.forks
def test_a_child_that_is_forked_by_a_signal_handler_leaves_the_step() -> None:
    result = run_python(
        """
        os.environ["SLOW"] = "0.2"
        children = []
        signal.signal(signal.SIGALRM, lambda *_: children.append(os.fork()))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            pipe(x)
        except RuntimeError as error:
            assert children == [0] and "does not survive a fork" in str(error), error
            with pykern.Pipeline([Slow(), Slow()], devices="cpu:2", microbatches=4) as own:
                sys.exit(11 if torch.equal(own(x), 4 * x) else 12)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
        """
    )
    assert (result.returncode, result.stderr) == (11, "")


def test_a_subinterpreter_is_refused() -> None:
    result = run_python(
        """
        try: import _interpreters as interpreters
        except ImportError: import _xxsubinterpreters as interpreters
        told = os.pipe()
        other = interpreters.create()
        interpreters.run_string(other, f'''
        import os, sys
        sys.path[:] = {sys.path}
        try:
            import pykern.plan
        except ImportError as error:
            os.write({told[1]}, str(error).encode())
        '''.replace("\\n        ", "\\n"))
        interpreters.destroy(other)
        print(os.read(told[0], 999).decode())
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    # From Python 3.12 on, Python itself may refuse first.
    assert "main interpreter only" in result.stdout or "subinterpreters" in result.stdout
