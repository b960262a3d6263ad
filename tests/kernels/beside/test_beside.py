"""Kernels of pykern, Liger and torch.compile on the same arguments: the kept figures again."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest
import torch

from tests.kernels.beside.save import LIGER, RESULTS, executed

HEADER, *KEPT = map(json.loads, RESULTS.read_text().splitlines())
OF_COUNTS = ("kernels", "launches", "of_torch", "bytes", "distinct_bytes", "least_bytes")


def by_case(lines: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    names = ("operation", "rows", "part", "contender")
    return {tuple(line[name] for name in names): line for line in lines}


def test_kept_figures_are_of_every_contender() -> None:
    cases = {case[:3] for case in by_case(KEPT)}
    operations = {operation for operation, _, _ in cases}
    assert operations == {"rms_norm", "layer_norm", "swiglu", "rope", "cross entropy"}
    contenders = {"pykern", "liger", "torch.compile"}
    assert by_case(KEPT).keys() == {(*case, who) for case in cases for who in contenders}


def test_no_contender_moves_fewer_bytes_in_a_forward_or_is_nearer_to_float64() -> None:
    lines = by_case(KEPT)
    for (*case, who), line in lines.items():
        ours = lines[*case, "pykern"]
        if line["part"] != "backward":
            assert ours["bytes"] <= line["bytes"], (case, who)
        # Sums of float32 in another order move a few roundings.
        assert ours["error"] <= 1.01 * line["error"], (case, who)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(version("triton") != HEADER["triton"], reason="another Triton")
@pytest.mark.skipif(version("torch") != HEADER["torch"], reason="another torch")
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA of its own")
def test_figures_of_few_rows_come_again() -> None:
    found = by_case(executed("--rows", "4", liger=LIGER.exists()))
    wanted = {
        case: line
        for case, line in by_case(KEPT).items()
        if line["rows"] == 4 and (LIGER.exists() or line["contender"] != "liger")
    }
    assert found.keys() == wanted.keys()
    for case, line in found.items():
        assert {x: line[x] for x in OF_COUNTS} == {x: wanted[case][x] for x in OF_COUNTS}, case
