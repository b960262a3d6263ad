"""docs/kernel-evidence.md shows the figures that are kept, and these are without fault."""

import json
import runpy
from pathlib import Path

from tests.kernels.ptx.faults import FAULTS
from tests.kernels.ptx.save import CAPABILITIES, DTYPES, RESULTS, SHAPES
from tests.kernels.ptx.test_executed import HAVE_STACK, HAVE_STACK_UNALIGNED
from tests.kernels.test_launching import KERNELS

ROOT = Path(__file__).parents[3]


def test_the_page_is_made_of_the_figures() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_kernel_evidence.py"))["made"]()
    page = (ROOT / "docs/kernel-evidence.md").read_text()
    assert made == page, "run python docs/make_kernel_evidence.py"


def test_kept_figures_are_of_every_kernel_and_without_fault() -> None:
    _, *kept = map(json.loads, RESULTS.read_text().splitlines())
    assert [line["summary"] for line in kept if "summary" in line] == list(SHAPES)
    for line in kept:
        if "summary" in line:
            known = HAVE_STACK if line["summary"] == "llama" else HAVE_STACK_UNALIGNED
            assert line["faults"] == []
            assert line["stack_bytes"].keys() <= known
    executed = [line for line in kept if "dtype" in line]
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            part = [x for x in executed if (x["capability"], x["dtype"]) == (capability, dtype)]
            assert {kernel for line in part for kernel in line["kernels"]} == KERNELS
    codes = [code for line in executed for code in line.get("machine_code", [])]
    assert {code["kernel"] for code in codes} == KERNELS
    for line in executed:
        spilling = {code["kernel"] for code in line.get("machine_code", []) if code["spills"]}
        assert spilling <= ({"activation._backward"} if line["capability"] == 120 else set())
    assert [line["fault"] for line in kept if "said" in line] == [fault.name for fault in FAULTS]
