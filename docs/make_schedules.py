"""Makes what docs/schedules.md shows: the pictures, the table, and the entries of the catalogue.

Run from anywhere: python docs/make_schedules.py. The text between two markers of the page is
replaced; a test compares page and pictures with what this makes.
"""

import inspect
import re
from pathlib import Path

from pykern.cli.catalogue import HEADINGS, entries, figures
from pykern.cli.values import ShareCosts
from pykern.plan.drawing.svg import as_svg
from pykern.schedules import by_name

DOCS = Path(__file__).parent
PAGE = "schedules.md"
NUM_DEVICES, NUM_MICROBATCHES = 4, 8
COSTS = ShareCosts(1, 1, 1)


def made() -> dict[str, str]:
    """Every file by its path in docs, with what it has to hold."""
    files, table, gallery = {}, [], []
    for name, planned in entries(NUM_DEVICES, NUM_MICROBATCHES, COSTS):
        if isinstance(planned, str):
            raise ValueError(f"{name} cannot be drawn: {planned}")
        plan, timeline = planned
        files[f"schedules/{name}.svg"] = as_svg({name: timeline})
        table.append([f"[`{name}`](#{name})", *figures(plan, timeline)])
        gallery.append(entry(name))
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    page = with_block(page, "table", markdown_table(table))
    return files | {PAGE: with_block(page, "gallery", "\n\n".join(gallery))}


def markdown_table(rows: list[list[str]]) -> str:
    """With the headings of `pykern schedules`."""
    lines = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def entry(name: str) -> str:
    """The first paragraph of the schedule's docstring, a link to its file, and its picture."""
    schedule = by_name[name]
    sentence = (inspect.getdoc(schedule) or "").split("\n\n")[0].replace("\n", " ")
    paper = re.search(r"^Paper: (.*?)$\n\n", inspect.getdoc(schedule) or "", re.M | re.S)
    source = schedule.__module__.rpartition(".")[2]
    return (
        f"### {name}\n\n{sentence}\n"
        f"{' '.join(paper[1].split()) if paper else ''}\n"
        f"[Rule and closed forms](../schedules/{source}.py)\n\n"
        f"![{name} on {NUM_DEVICES} devices](schedules/{name}.svg)"
    )


def with_block(page: str, name: str, content: str) -> str:
    """The page with other content between the two markers of that name."""
    start, end = f"<!-- {name}: made by docs/make_schedules.py -->", f"<!-- end of {name} -->"
    before, found, rest = page.partition(start)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{PAGE} lacks {start} or {end}")
    return f"{before}{start}\n\n{content}\n\n{end}{after}"


def main() -> None:
    """Write all of it, and remove pictures of schedules that are no more."""
    files = made()
    for picture in (DOCS / "schedules").glob("*.svg"):
        if f"schedules/{picture.name}" not in files:
            picture.unlink()
    for path, content in files.items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
