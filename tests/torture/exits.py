"""Programs that end in every state that a pipeline can be in, in every way that a program ends."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from .campaign import Campaign

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 120

_PRELUDE = """
import atexit, contextvars, gc, os, signal, sys, threading, time, torch, pykern
from torch import nn
import torch.nn.functional as F
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
slow, fails, leaves = [0.0], [False], [None]

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        time.sleep(slow[0])
        if fails[0]:
            raise ValueError("planted")
        if leaves[0] is not None:
            sys.exit(leaves[0])
        return self.linear(x)

pipe = pykern.Pipeline([Layer(), Layer()], devices="cpu:2", microbatches=4, loss_fn=F.mse_loss)
x = torch.ones(4, 2)

def step():
    return pipe.step(x, target=x)

def forever():
    try:
        while True:
            step()
    except RuntimeError as error:
        assert "closed" in str(error), error
"""

STATES: dict[str, str] = {
    "before any step": "",
    "after a step": "step()",
    "after a step that failed": """
        fails[0] = True
        try:
            step()
        except ValueError as error:
            kept = error
        fails[0] = False
    """,
    "after a step that was interrupted": """
        slow[0] = 0.3
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            step()
        except KeyboardInterrupt as error:
            kept = error
    """,
    "with a stage that left by sys.exit": """
        leaves[0] = 3
        try:
            step()
        except SystemExit as error:
            kept = error
    """,
    "with a stream that is open": "stream = pipe.stream([x] * 9); next(stream)",
    "with a stream that is left": """
        for y in pipe.stream([x] * 9):
            break
    """,
    "with a stream that was interrupted": """
        slow[0] = 0.1
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for y in pipe.stream([x] * 99):
                pass
        except KeyboardInterrupt as error:
            kept = error
        slow[0] = 0.0
    """,
    "while a daemon thread steps": """
        slow[0] = 0.005
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.05)
    """,
    "while a daemon thread streams": """
        slow[0] = 0.005
        def streaming():
            try:
                for y in pipe.stream([x] * 10**6):
                    pass
            except RuntimeError:
                pass
        threading.Thread(target=streaming, daemon=True).start()
        time.sleep(0.05)
    """,
    "closed": "step(); pipe.close()",
    "in a cycle": "pipe.myself = [pipe]; step()",
    "let go of": "step(); del pipe; gc.collect()",
    "with a step at exit": "atexit.register(step)",
    "with a pipeline made at exit": """
        @atexit.register
        def late():
            other = pykern.Pipeline([Layer(), Layer()], devices="cpu:2", microbatches=2)
            other(x)
    """,
    "with tensors in threads": """
        local, variable = threading.local(), contextvars.ContextVar("variable")
        def keep(module, args, output):
            local.kept = output.view(-1)
            variable.set(output * 2)
        for module in pipe.modules():
            if isinstance(module, Layer):
                module.register_forward_hook(keep)
        step()
    """,
    "after a fork that has ended": """
        step()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        step()
    """,
    "in a child that was forked": """
        step()
        child = os.fork()
        if child:
            status = os.waitpid(child, 0)[1]
            os._exit(os.waitstatus_to_exitcode(status) % 256)
    """,
}

# With the code that the program then has; a child's signal has its parent end with 256 less it.
ENDINGS: dict[str, tuple[str, int]] = {
    "at its end": ("", 0),
    "by sys.exit": ("sys.exit(7)", 7),
    "by an exception": ("raise LookupError('planted')", 1),
    "by os._exit": ("os._exit(5)", 5),
    "by SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -15),
}
_ALL = [*product(STATES, ENDINGS)]
# The interpreter itself ends so when something is wrong.
_NOISE = ("Fatal", "terminate called", "Segmentation", "double free", "Aborted", "corrupted")


def cases(seed: int, number: int) -> Iterator[str]:
    """One program."""
    # Prime to any count here.
    state, ending = _ALL[(number * 7919 + seed) % len(_ALL)]
    code, expected = ENDINGS[ending]
    if state == "in a child that was forked":
        expected %= 256
    require_end(f"{state}, {ending}", STATES[state], code, expected)
    yield "programs"
    yield f"ended {ending}"


def require_end(name: str, state: str, ending: str, expected: int) -> None:
    """Runs the program, and looks at how it ends."""
    code = _PRELUDE + textwrap.dedent(state) + "\n" + textwrap.dedent(ending) + "\n"
    try:
        result = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{name}: it hangs") from error
    assert result.returncode == expected, (
        f"{name}: ended with {result.returncode}, not {expected}\n{result.stderr[-3000:]}"
    )
    noise = [word for word in _NOISE if word in result.stderr]
    assert not noise, f"{name}: {result.stderr[-3000:]}"


CAMPAIGN = Campaign(
    promise=(
        "A program exits with its own status, in time and without other output, whatever a "
        "pipeline is doing."
    ),
    case=cases,
    total=len(_ALL),
)
