"""Programs of their own with a pipeline: how they end, and what they may do beside it."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tests.diagonal import nightly


def run_python(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own, with a pipeline of two slow stages named `pipe`."""
    prelude = """
        import os, signal, sys, threading, time, torch, pykern
        from torch import nn
        class Slow(nn.Module):
            def forward(self, x):
                time.sleep(float(os.environ.get("SLOW", "0")))
                return x * 2
        pipe = pykern.Pipeline([Slow(), Slow()], devices="cpu:2", microbatches=4)
        x = torch.ones(4, 2)
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_too_many_threads_are_an_error_and_not_the_end() -> None:
    result = run_python(
        """
        import resource
        mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 200 * 2**20, resource.RLIM_INFINITY))
        try:
            pykern.Pipeline([Slow() for _ in range(256)], devices="cpu:256", microbatches=1)
        except RuntimeError:
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


# What each of these does, another test here does before it ends.
AT_NIGHT = {"before any step", "after a step", "by sys.exit", "closed"}


@pytest.mark.parametrize("name", [nightly(name) if name in AT_NIGHT else name for name in EXITS])
def test_the_process_ends_with_its_own_code_and_no_noise(name: str) -> None:
    code, expected = EXITS[name]
    result = run_python(code)
    assert (result.returncode, result.stderr) == (expected, "")


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
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(64.0).view(32, 2))
        total = 0
        for epoch in range(2):
            for (batch,) in DataLoader(data, batch_size=4, num_workers=2):
                total += pipe(batch).sum()
        assert total == 2 * 4 * 64 * 63 / 2, total
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
