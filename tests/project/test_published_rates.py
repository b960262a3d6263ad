"""The page of published rates shows what the code predicts, and says how far that is off."""

import re
import runpy
from pathlib import Path


def test_the_page_is_what_the_code_gives(root: Path) -> None:
    made = runpy.run_path(str(root / "docs/make_published.py"))["made"]()
    page = (root / "docs/published-rates.md").read_text()
    assert made == page, "run python docs/make_published.py"


def test_no_difference_is_larger_than_the_guide_says(root: Path) -> None:
    page = (root / "docs/published-rates.md").read_text()
    _, *runs = page.split("<!-- end of table layers -->")
    found = [abs(int(share)) for share in re.findall(r"\| ([+-]\d+)% \|", "".join(runs))]
    said = re.search(
        r"has (\d+) runs .*? up to (\d+) %", (root / "docs/parallel.md").read_text(), re.DOTALL
    )
    assert said is not None
    assert [len(found), max(found)] == [int(said[1]), int(said[2])]


def test_operations_are_those_of_the_paper(root: Path) -> None:
    script = runpy.run_path(str(root / "docs/make_published.py"))
    run = script["NARAYANAN"][6]
    rows, s, layers, h, words = 2304, 2048, 80, 12_288, 51_200
    published = 96 * rows * s * layers * h**2 * (1 + s / (6 * h) + words / (16 * layers * h))
    assert abs(script["tera_per_gpu"](run) / (published / 1536 / 1e12) - 1) < 1e-12
