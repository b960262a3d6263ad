"""Plan and checkpoint files that were changed: accepted only as what they are, or refused."""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pykern import checkpoint
from pykern.checkpoint import CheckpointError
from pykern.plan import load_plan, save_plan
from pykern.plan.files.json_form import checksum
from tests.checkpoint import forging
from tests.checkpoint.runs import Run, plain, same

from .campaign import Campaign
from .plans import MUTATIONS
from .raw import Form, Raw, random_plan, raw_of
from .rules import broken, is_table

_FORM = Form(max_stages=4, max_microbatches=3, pairs=0.0)
# Neither a .csv of torch's runtime nor this project's has these.
_CSV_FORM = Form(
    max_stages=4,
    replicas=0.0,
    slices=0.0,
    recompute=0.0,
    offload=0.0,
    reductions=0.0,
    updates=0.0,
    pairs=0.0,
)
# Calls for each byte of a file at most, and for a file without any.
_CALLS_A_BYTE, _CALLS = 40, 60_000
_HOSTILE = (b"\xff", b"\x00", b"[" * 2000, b"{" * 2000, b"9" * 5000, b"1e999", b"NaN", b"-1", b"\n")


def cases(seed: int, number: int) -> Iterator[str]:
    """One file of each form."""
    rng = random.Random(f"{seed} {number}")
    with tempfile.TemporaryDirectory() as folder:
        yield from _json_bytes(rng, Path(folder) / "plan.json")
        yield from _json_forged(rng, Path(folder) / "plan.json")
        yield from _csv(rng, Path(folder) / "plan.csv")
        yield from _checkpoint_bytes(rng, Path(folder) / "run.ckpt")
        yield from _checkpoint_forged(rng, Path(folder) / "run.ckpt")


def _valid(rng: random.Random, form: Form) -> Raw:
    while True:
        raw = random_plan(rng, form)
        if form is not _CSV_FORM or any(a[0] in ("B", "I") for row in raw.rows for a in row):
            return raw


def _changed(rng: random.Random, data: bytes) -> bytes:
    """Some bytes are gone, twice there, flipped, or replaced by what readers dislike."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((0, 1, 1, 2, 40)))
        new = rng.choice((b"", data[at:end] * 2, bytes([rng.randrange(256)]), rng.choice(_HOSTILE)))
        data = data[:at] + new + data[end:]
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data


def _json_bytes(rng: random.Random, path: Path) -> Iterator[str]:
    """The checksum is of what is said: what is accepted says what was saved."""
    plan = _valid(rng, _FORM).plan()
    save_plan(plan, path)
    path.write_bytes(_changed(rng, path.read_bytes()))
    found = _read(rng, path, load_plan, ValueError)
    assert found is None or found == plan, path.read_bytes()
    yield "plans as JSON with other bytes"
    yield from ("accepted: they say the same" for _ in (found,) if found is not None)


def _json_forged(rng: random.Random, path: Path) -> Iterator[str]:
    """Another plan under a checksum that is right: accepted if the rules accept it."""
    raw = _valid(rng, _FORM)
    save_plan(raw.plan(), path)
    content = json.loads(path.read_text())
    mutant = rng.choice(MUTATIONS)(rng, raw.copy())
    content |= {
        "num_devices": mutant.num_devices,
        "num_stages": mutant.num_stages,
        "num_microbatches": mutant.num_microbatches,
        "num_slices": mutant.num_slices,
        "replicas": mutant.replicas,
        "rows": [" ".join(map(_text, row)) for row in mutant.rows],
        "overlaps": mutant.overlaps,
    }
    path.write_text(json.dumps(content | {"sha256": checksum(content)}))
    found = _read(rng, path, load_plan, ValueError)
    runs = is_table(mutant) and not broken(mutant)
    # Rows without pairs may be said by no list, of which a file has one for each.
    runs = runs and len(mutant.overlaps) == len(mutant.rows)
    assert (found is not None) == runs, (runs, mutant)
    assert found is None or raw_of(found) == mutant, mutant
    yield "plans as JSON under a right checksum"
    yield f"of these {'accepted' if runs else 'refused'}"


def _text(action: tuple[str, int, int, int]) -> str:
    kind, stage, microbatch, part = action
    return f"{stage}{kind}{microbatch}" + (f".{part}" if part else "")


def _csv(rng: random.Random, path: Path) -> Iterator[str]:
    """Has no checksum: what is accepted can run, and is saved as what was read."""
    save_plan(_valid(rng, _CSV_FORM).plan(), path, transfers=rng.random() < 0.5)
    path.write_bytes(_changed(rng, path.read_bytes()))
    found = _read(rng, path, load_plan, ValueError)
    if found is not None:
        assert not broken(raw_of(found)), path.read_bytes()
        save_plan(found, path.with_suffix(".json"))
        assert load_plan(path.with_suffix(".json")) == found
    yield "plans as CSV with other bytes"
    yield from ("of these accepted" for _ in (found,) if found is not None)


@cache
def _run() -> tuple[Run, bytes]:
    """A training run, and its checkpoint."""
    torch.manual_seed(0)
    run = plain()
    run.train(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        checkpoint.save(path, **run.parts(), extra={"a": [1, (2.5, None)]}, grads=True)
        return run, path.read_bytes()


def _checkpoint_bytes(rng: random.Random, path: Path) -> Iterator[str]:
    """An accepted file has every bit that was saved; a refused file changes nothing."""
    run, data = _run()
    path.write_bytes(data)
    checkpoint.load(path, **run.parts())
    saved = run.states()
    path.write_bytes(_changed(rng, data))
    _read(rng, path, lambda file: checkpoint.load(file, **run.parts()), CheckpointError)
    assert same(run.states(), saved)
    yield "checkpoints with other bytes"


def _checkpoint_forged(rng: random.Random, path: Path) -> Iterator[str]:
    """Another index under a checksum that is right: refused, and then nothing is changed."""
    run, data = _run()
    path.write_bytes(data)
    checkpoint.load(path, **run.parts())
    saved = run.states()
    forging.forge(path, lambda index: _forge(rng, index))
    loaded = _read(rng, path, lambda file: [checkpoint.load(file, **run.parts())], CheckpointError)
    assert loaded is not None or same(run.states(), saved), path.read_bytes()
    yield "checkpoints under a right checksum"
    yield from ("of these loaded" for _ in (loaded,) if loaded is not None)


def _forge(rng: random.Random, index: forging.Index) -> None:
    container, key = rng.choice([*forging.places(index)])
    values: tuple[Any, ...] = (None, -1, 0, 1.5, 1e999, 2**70, "", "0.bias", [], {}, [[]], True)
    others = [container[key], *(one for _, one in [rng.choice([*forging.places(index)])])]
    container[key] = rng.choice((*values, *others))


class _Counts:
    """Calls of Python's and of C's functions, by which work is bounded without a clock."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> "_Counts":
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, _frame: FrameType, event: str, _: object) -> None:
        self.calls += event in ("call", "c_call")


def _read(
    rng: random.Random, path: Path, read: Callable[[Path], Any], refusal: type[Exception]
) -> Any:
    """The result of the read, or None for a refusal; both within a bounded number of calls."""
    before = sys.getprofile()
    with _Counts() as counts:
        try:
            found = read(path)
        except refusal:
            found = None
    sys.setprofile(before)
    most = _CALLS + _CALLS_A_BYTE * path.stat().st_size
    assert counts.calls <= most, f"{counts.calls} calls for {path.stat().st_size} bytes"
    return found


CAMPAIGN = Campaign(
    promise=(
        "A changed plan or checkpoint file is either refused without side effects, or loaded with "
        "the contents of the file. The number of calls is bounded by the size of the file."
    ),
    case=cases,
)
