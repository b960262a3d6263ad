"""Interrupts at lines of pykern's own code, as if a signal handler raised them there."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar
from unittest.mock import patch

from tests import interrupts
from tests.runtime.test_interrupted_lines import (
    SETTINGS,
    test_the_next_step_is_that_of_a_fresh_pipeline,
)
from tests.trace.test_interrupted import WAYS, test_an_interrupted_recording_leaves_no_trace

from .campaign import Campaign

# Not for pytest to collect from here.
_interrupted_step = test_the_next_step_is_that_of_a_fresh_pipeline
_interrupted_recording = test_an_interrupted_recording_leaves_no_trace

# The tests that are interrupted at every n-th line.
SUBJECTS: dict[str, Callable[[int], object]] = {
    **{f"a step: {name}": partial(_interrupted_step, name) for name in SETTINGS},
    **{f"recording: {way.__name__}": partial(_interrupted_recording, way) for way in WAYS},
}
# Lines of a recording are many, and mostly those of one loop.
_STRIDES = {"a": (15, 60), "recording": (150, 400)}


class _Counted(interrupts.Interrupt):
    """Remembers where it was raised."""

    places: ClassVar[list[str]] = []

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if self.where:
            self.places.append(self.where)


def cases(seed: int, number: int) -> Iterator[str]:
    """One thing is interrupted at some of its lines: which, the stride says."""
    name = list(SUBJECTS)[(number + seed) % len(SUBJECTS)]
    stride = random.Random(f"{seed} {number}").randint(*_STRIDES[name.split()[0].rstrip(":")])
    _Counted.places.clear()
    with patch.object(interrupts, "Interrupt", _Counted):
        SUBJECTS[name](stride)
    for _ in _Counted.places:
        yield "interrupts"
        yield f"interrupts of {name.partition(':')[0]}"


CAMPAIGN = Campaign(
    promise=(
        "A KeyboardInterrupt at any line of a step or of a recording leaves no mode, hook or "
        "patched function behind. The next step is bitwise equal to that of a fresh pipeline. (All "
        "lines in turn: `pytest -m nightly tests/runtime/test_interrupted_lines.py "
        "tests/trace/test_interrupted.py`.)"
    ),
    case=cases,
)
