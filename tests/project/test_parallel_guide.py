"""The guide to several processes shows what the code gives: picture, predictions, examples."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from pykern.plan import with_replicas
from pykern.schedules import one_f_one_b


def made(root: Path) -> Any:
    return runpy.run_path(str(root / "docs/make_parallel.py"))["made"]()


@pytest.mark.slow
def test_the_guide_is_what_the_code_gives(root: Path) -> None:
    stale = [
        name for name, text in made(root).items() if (root / "docs" / name).read_text() != text
    ]
    assert stale == [], "run python docs/make_parallel.py"


def test_every_block_of_the_guide_is_there_and_closed(root: Path) -> None:
    page = (root / "docs/parallel.md").read_text()
    starts = re.findall(r"<!-- (?!end of )([^>]+?) -->", page)
    assert starts == re.findall(r"<!-- end of ([^>]+?) -->", page)
    assert {"table weak", "table 7B", "table 67B", "plain.py", "data_parallel.py"} <= set(starts)


def test_the_plan_of_replicas_is_the_one_that_is_shown(root: Path) -> None:
    assert (
        f"```\n{with_replicas(one_f_one_b(2, 4), 2)}\n```"
        in (root / "docs/parallel.md").read_text()
    )
