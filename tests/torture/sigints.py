"""Real SIGINTs at random times, in a program of its own that goes on and looks at what is left.

The program does one thing over and over until the interrupt arrives; then it looks, with nothing
that interrupts it, whether its next steps are right. The parent sees an exit, a line, or a
timeout.
"""

import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .campaign import Campaign

ROOT = Path(__file__).resolve().parents[2]

# Signals that one program gets.
SIGNALS = 50
# How long after it began the interrupt arrives, at most: a few rounds of each thing.
_MOST_SECONDS = 0.03
# A process that has said nothing for so long hangs, on however busy a machine.
_PATIENCE_S = 120.0


def say(line: str) -> None:
    """The output of the program for its parent, without delay."""
    os.write(1, f"{line}\n".encode())


class Child:
    """The program, which says a line of what it is about to do, or has found."""

    def __init__(self, seed: int, number: int, module: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, self._folder.name, str(seed), str(number)],
            cwd=ROOT,
            # `select` does not see a line that a buffer of this process has.
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        )

    def line(self) -> str:
        """The next line of the program; empty if the program has ended.

        Raises:
            AssertionError: the program does not write a line in time.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE_S)
        if not ready:
            self._process.send_signal(signal.SIGABRT)  # faulthandler then says where it hangs
            time.sleep(1)
            raise AssertionError(f"it hangs\n{self._said()}")
        return self._process.stdout.readline().decode().strip()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def ended(self) -> None:
        """Waits for its end, which must be an ordinary one."""
        code = self._process.wait(timeout=_PATIENCE_S)
        assert code == 0, f"it ended with {code}\n{self._said()}"

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()
        self._folder.cleanup()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-6000:]


def cases(seed: int, number: int, module: str = "tests.torture.sigint_child") -> Iterator[str]:
    """A program that is interrupted time after time."""
    rng = random.Random(f"{seed} {number}")
    child = Child(seed, number, module)
    try:
        for _ in range(SIGNALS):
            line = child.line()
            if not line.startswith("begin "):
                child.ended()
                raise AssertionError(f"it said {line!r} and ended")
            time.sleep(rng.uniform(0.0, _MOST_SECONDS))
            child.interrupt()
            outcome = child.line()
            yield "signals"
            yield f"signals while it did {line.removeprefix('begin ')}"
            if outcome != "right":
                if not outcome:
                    child.ended()
                assert outcome.startswith("swallowed by Python in "), f"{line}: {outcome}"
                yield outcome
        child.line()
        child.ended()
    finally:
        child.close()


CAMPAIGN = Campaign(
    promise=(
        "A real SIGINT at any time during steps, streams, recording, construction and checkpoints "
        "raises KeyboardInterrupt in the caller; Python prints one that arrives in a finalizer. "
        "The process neither aborts nor hangs, and the next step is bitwise right."
    ),
    case=cases,
    seconds=120.0,
)
