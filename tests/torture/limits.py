"""Programs that meet a limit of the system: they get an error, and go on or end as Python does."""

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from .campaign import Campaign

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 120

_PRELUDE = """
import errno, os, resource, sys, threading, torch, pykern
from pathlib import Path
from torch import nn
import torch.nn.functional as F
from pykern import checkpoint
from pykern.plan import load_plan, save_plan
from pykern.schedules import one_f_one_b
torch.set_num_threads(1)
folder = Path(sys.argv[1])
# Python would keep a part of a compiled module where it cannot write all of it.
sys.dont_write_bytecode = True

def limit(what, size):
    resource.setrlimit(what, (size, resource.getrlimit(what)[1]))

def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def net(layers=2, width=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

def pipe_of(model, devices=2, **options):
    options = {"microbatches": 2, "loss_fn": F.mse_loss, **options}
    return pykern.Pipeline(model, devices=f"cpu:{devices}", **options)

def refused(act, *kinds):
    try:
        act()
    except kinds as error:
        return error
    raise SystemExit(f"{act} was not refused")

x = torch.ones(4, 4)
pipe = pipe_of(net())
expected = pipe.step(x, target=x)
pipe.zero_grad()

def whole():
    assert torch.equal(pipe.step(x, target=x), expected)
"""

# The code of each program after the prelude. A program exits with 11 if every check passed.
PROGRAMS: dict[str, str] = {
    "no memory for more threads": """
        limit(resource.RLIMIT_AS, mapped() + 200 * 2**20)
        refused(lambda: pipe_of(net(256), 256, microbatches=1), RuntimeError, OSError, MemoryError)
        whole()
    """,
    "no more threads allowed": """
        # root is not counted
        if os.getuid() == 0:
            os.setgid(65534); os.setuid(65534)
        limit(resource.RLIMIT_NPROC, 1)
        refused(lambda: pipe_of(net(8), 8, microbatches=1), RuntimeError, OSError)
        whole()
    """,
    "no memory for an activation": """
        limit(resource.RLIMIT_AS, mapped() + 400 * 2**20)
        big = torch.ones(4, 4).expand(2**26, 4, 4)[:, 0]
        refused(lambda: pipe.step(big, target=big), RuntimeError, MemoryError)
        pipe.zero_grad()
        whole()
    """,
    "no memory for a long plan": """
        limit(resource.RLIMIT_AS, mapped() + 100 * 2**20)
        refused(lambda: one_f_one_b(64, 2**18), MemoryError, RuntimeError, ValueError)
        whole()
    """,
    "a plan larger than a file may be": """
        limit(resource.RLIMIT_FSIZE, 100)
        error = refused(lambda: save_plan(one_f_one_b(2, 40), folder / "plan.json"), OSError)
        assert error.errno == errno.EFBIG, error
        assert not list(folder.iterdir())
        whole()
    """,
    "a checkpoint larger than a file may be": """
        checkpoint.save(folder / "run.ckpt", pipe, extra=1)
        limit(resource.RLIMIT_FSIZE, 100)
        refused(lambda: checkpoint.save(folder / "run.ckpt", pipe, extra=2), OSError)
        assert checkpoint.load(folder / "run.ckpt", pipe) == 1
        whole()
    """,
    "a full disk": """
        full = Path("/dev/full")
        disk = folder / "disk"
        disk.mkdir()
        if os.system(f"mount -t tmpfs -o size=16k tmpfs {disk} 2>/dev/null") == 0:
            try:
                (disk / "filler").write_bytes(b"x" * 8192)
                error = refused(lambda: save_plan(one_f_one_b(8, 400), disk / "plan.json"), OSError)
                assert error.errno == errno.ENOSPC, error
                error = refused(
                    lambda: checkpoint.save(disk / "run.ckpt", net(4, 64)), OSError, ValueError
                )
                assert [each.name for each in disk.iterdir()] == ["filler"]
            finally:
                os.system(f"umount {disk}")
        whole()
    """,
    "a folder that may not be written": """
        if os.getuid() == 0:
            os.setgid(65534); os.setuid(65534)
        refused(lambda: save_plan(one_f_one_b(2, 2), "/proc/plan.json"), OSError)
        refused(lambda: checkpoint.save("/proc/run.ckpt", pipe), OSError)
        whole()
    """,
    "a name of 250 characters": """
        name = folder / ("x" * 245 + ".json")
        save_plan(one_f_one_b(2, 2), name)
        assert load_plan(name) == one_f_one_b(2, 2)
        name = folder / ("x" * 245 + ".ckpt")
        checkpoint.save(name, pipe, extra=3)
        assert checkpoint.load(name, pipe) == 3
        whole()
    """,
    "a name that is too long": """
        refused(lambda: save_plan(one_f_one_b(2, 2), folder / ("x" * 300 + ".json")), OSError)
        refused(lambda: checkpoint.save(folder / ("x" * 300), pipe), OSError)
        assert not list(folder.iterdir())
        whole()
    """,
    "no more open files": """
        limit(resource.RLIMIT_NOFILE, 3)
        refused(lambda: save_plan(one_f_one_b(2, 2), folder / "plan.json"), OSError)
        refused(lambda: checkpoint.save(folder / "run.ckpt", pipe), OSError, ValueError)
        with pipe_of(net()) as other:
            other.step(x, target=x)
        whole()
    """,
    "counts beyond all bounds": """
        for devices, microbatches in ((2**17, 1), (1, 2**40), (2, 2**24), (2**16, 2**16)):
            refused(lambda: one_f_one_b(devices, microbatches), ValueError, TypeError)
        refused(lambda: pipe_of(net(), 2, microbatches=2**40), ValueError, TypeError)
        whole()
    """,
    "a stack that is nearly used up": """
        def deep(left):
            return pipe.step(x, target=x) if left == 0 else deep(left - 1)
        for left in range(0, sys.getrecursionlimit(), 7):
            try:
                deep(left)
            except RecursionError:
                pass
        pipe.zero_grad()
        whole()
    """,
}
_NAMES = list(PROGRAMS)


def cases(seed: int, number: int) -> Iterator[str]:
    """One program."""
    name = _NAMES[(number + seed) % len(_NAMES)]
    require_end(name, _PRELUDE + textwrap.dedent(PROGRAMS[name]) + "\nsys.exit(11)\n", 11)
    yield "programs"
    yield name


def require_end(name: str, code: str, expected: int) -> None:
    """Runs it, with a folder of its own as its argument."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        result = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", code, folder],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    assert result.returncode == expected, (
        f"{name}: ended with {result.returncode}\n{result.stderr[-3000:]}"
    )


CAMPAIGN = Campaign(
    promise=(
        "If threads, memory, files, disk, names, counts or the stack run out, an error says so. "
        "No partial result is left, and the next step is bitwise right."
    ),
    case=cases,
    total=len(PROGRAMS),
)
