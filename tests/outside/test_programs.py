"""Programs around plain modules train the same when modules are pipelines."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import pykern
from tests.outside.programs import PROGRAMS

OPTIONS: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "zb_h1"},
    {"schedule": "one_f_one_b", "recompute": "stage"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["schedule"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_it_trains_as_with_plain_modules(program: Any, options: dict[str, Any]) -> None:
    expected = program(lambda module: module)
    with ExitStack() as pipes:

        def wrap(module: nn.Module) -> nn.Module:
            pipe = pykern.Pipeline(module, devices="cpu:2", microbatches=2, **options)
            return pipes.enter_context(pipe)

        found = program(wrap)
    for mine, theirs in zip(found, expected, strict=True):
        for parameter, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(parameter, other)
