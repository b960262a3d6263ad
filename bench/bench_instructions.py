"""Contenders are the same, and a count of Valgrind is read."""

from pathlib import Path

import pytest

from . import instructions
from .harness import assert_same_answer
from .shared_library import compile_library

WRITTEN = """version: 1
creator: callgrind-3.19.0
part: 2
desc: Trigger: Client Request: pykern, 1 worker|384
events: Ir
fn=(4)
0 12
totals: 62213968
"""


@pytest.mark.parametrize("case", instructions.CASES)
def test_contenders_of_a_case(case: str, smoke: bool) -> None:
    if not smoke:
        return  # its figures are for `python -m bench.instructions`, with a table of its own
    contenders, num_actions = instructions.contenders(case, 2)
    assert num_actions % 4 == 0
    if "dropout" not in case:
        assert_same_answer(contenders)


def test_marks_outside_valgrind(smoke: bool, tmp_path: Path) -> None:
    if not smoke:
        return
    if not Path("/usr/include/valgrind/callgrind.h").exists():
        pytest.skip("the header of Valgrind is not installed")
    compile_library([instructions.MARKS], tmp_path / "marks.so")
    instructions.run("S = 1", 2, str(tmp_path / "marks.so"))


def test_a_count_is_read() -> None:
    assert instructions.read(WRITTEN) == ("pykern, 1 worker", 62213968 / 384)
