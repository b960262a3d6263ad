"""Makes what docs/parallel.md shows: its picture, its table, and the examples as they are.

Run from anywhere: python docs/make_parallel.py. The text between two markers of the page is
replaced; a test compares page and picture with what this makes.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pykern.cli.scale_command import HEADINGS, SCHEDULES, row
from pykern.plan.drawing.svg import number, text
from pykern.scale import (
    DGX_H100,
    DGX_H200,
    Cluster,
    Job,
    Layout,
    Transformer,
    best,
    predict,
    straggler,
)

DOCS = Path(__file__).parent
PAGE, PICTURE = "parallel.md", "parallel/mesh.svg"

SMALLER = Job(Transformer(32, 4096, 4096, 32_000), batch=512)
LARGER = Job(Transformer(80, 8192, 4096, 128_000), batch=512, zero=1)
SIZES = (8, 64, 256, 1024)
DOUBLED = (8, 16, 32, 64, 128, 256, 512, 1024)
ROWS_PER_PIPELINE = 64
SLOWDOWNS = (1.1, 1.2, 1.5)
SLOWED = (Layout(256, 2, 1), Layout(64, 2, 4), Layout(32, 2, 8))

# In points: a GPU, the room between two, and around them in a box.
CELL_WIDTH, CELL_HEIGHT, GAP, MARGIN = 76.0, 34.0, 16.0, 14.0
LABEL_HEIGHT, TITLE_HEIGHT, BETWEEN_BOXES = 16.0, 34.0, 44.0
NUM_STAGES = 4
FILLS = ("#a8ceec", "#facf98", "#bee2d8", "#d4c6ee")
LINES = {"tp": "#b0285c", "dp": "#215e9c"}


def made() -> dict[str, str]:
    """Every file by its path in docs, with what it has to hold."""
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    blocks = {
        "table weak": growing(),
        "table 7B": table(SMALLER, DGX_H100),
        "table 67B": table(LARGER, DGX_H200),
        "table stragglers": slowed(),
    }
    for path in sorted((DOCS / "examples").glob("*.py")):
        blocks[path.name] = f"```python\n{path.read_text(encoding='utf-8')}```\n"
    for name, content in blocks.items():
        page = with_block(page, name, content)
    return {PAGE: page, PICTURE: mesh_picture()}


def with_block(page: str, name: str, content: str) -> str:
    """The page with other content between the markers of that name, where it has them."""
    block = rf"(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- end of {re.escape(name)} -->)"
    return re.sub(block, lambda _: content, page, flags=re.DOTALL)


def table(job: Job, cluster: Cluster) -> str:
    """The two best layouts for each number of GPUs."""
    lines = [list(HEADINGS), ["---:"] * len(HEADINGS)]
    for num_gpus in SIZES:
        found = best(job, cluster, num_gpus, SCHEDULES.split(","), top=2)
        lines += map(row, found)
        if not found:
            lines.append([str(num_gpus), "nothing fits", *[""] * (len(HEADINGS) - 2)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def growing() -> str:
    """More pipelines of the same form, each with as many rows, with and without ZeRO-1."""
    headings = ["GPUs", "pipelines", "step ms", "data ms", "exposed ms", "memory GB"]
    zero = [f"{heading}, ZeRO-1" for heading in headings[2:]]
    lines = [headings + zero, ["---:"] * (len(headings) + len(zero))]
    for num_gpus in DOUBLED:
        layout = Layout(num_gpus // NUM_STAGES, 1, NUM_STAGES)
        job = replace(SMALLER, batch=ROWS_PER_PIPELINE * layout.data)
        line = [str(num_gpus), str(layout.data)]
        for each in (job, replace(job, zero=1)):
            shown = row(predict(each, DGX_H100, layout, "interleaved"))
            line += [shown[HEADINGS.index(heading)] for heading in headings[2:]]
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def slowed() -> str:
    """One GPU of 512 that is slower, by layout and schedule."""
    headings = ["dp x tp x pp", "schedule", "step ms", *(f"{f:g} times" for f in SLOWDOWNS)]
    headings.append(f"{SLOWDOWNS[-1]:g} times, mean over places")
    lines = [headings, ["---:"] * len(headings)]
    for layout in SLOWED:
        for schedule in SCHEDULES.split(","):
            found = [straggler(SMALLER, DGX_H100, layout, schedule, f) for f in SLOWDOWNS]
            worst = [f"+{each.worst:.1%}" for each in found]
            step = f"{found[0].even_ns / 1e6:,.0f}"
            lines.append([str(layout), schedule, step, *worst, f"+{found[-1].mean:.1%}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class Panel(NamedTuple):
    """A mesh of processes: box after box, row after row, each with a GPU for every stage."""

    title: str
    num_boxes: int
    slices: int


PANELS = (
    Panel("DP x PP: four processes, mesh (dp: 4)", 2, 1),
    Panel("TP x PP: two processes, mesh (tp: 2)", 1, 2),
    Panel("DP x TP x PP: four processes, mesh (dp: 2, tp: 2)", 2, 2),
)


def mesh_picture() -> str:
    """Which process owns which GPU, and who sums with whom, on boxes of eight GPUs."""
    box_width, box_height = box_size()
    width = 2 * box_width + BETWEEN_BOXES + 2 * MARGIN
    height = len(PANELS) * (TITLE_HEIGHT + box_height) + LABEL_HEIGHT + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" '
        'font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for place, panel in enumerate(PANELS):
        top = MARGIN + place * (TITLE_HEIGHT + box_height)
        lines.append(text(MARGIN, top + 20, panel.title, ' font-size="12" font-weight="bold"'))
        lines += boxes(panel, top + TITLE_HEIGHT)
    lines += [*legend(height - MARGIN), "</svg>\n"]
    return "\n".join(lines)


def box_size() -> tuple[float, float]:
    """Width and height of a box with two processes."""
    width = NUM_STAGES * (CELL_WIDTH + GAP) - GAP + 2 * MARGIN
    return width, 2 * (LABEL_HEIGHT + CELL_HEIGHT) + GAP + 10


def boxes(panel: Panel, top: float) -> Iterator[str]:
    """The boxes of a panel, and the lines between them."""
    box_width, box_height = box_size()
    for box in range(panel.num_boxes):
        left = MARGIN + box * (box_width + BETWEEN_BOXES)
        size = f'width="{number(box_width)}" height="{number(box_height)}"'
        place = f'x="{number(left)}" y="{number(top)}"'
        yield f'<rect {place} {size} rx="8" fill="#f4f4f4" stroke="#888"/>'
        more = ' text-anchor="end" fill="#666"'
        yield text(left + box_width - MARGIN, top + 12, f"box {box}", more)
        across = "tp" if panel.slices == 2 else "dp"
        for which in range(2):
            yield from process(panel, 2 * box + which, left + MARGIN, row_top(top, which))
        for stage in range(NUM_STAGES):
            x = left + MARGIN + stage * (CELL_WIDTH + GAP) + CELL_WIDTH / 2
            yield joined(x, row_top(top, 0) + CELL_HEIGHT, x, row_top(top, 1), across)
    if panel.num_boxes == 2:
        for which in range(2):
            y = row_top(top, which) + CELL_HEIGHT / 2
            x = MARGIN + box_width
            yield joined(x, y, x + BETWEEN_BOXES, y, "dp")


def row_top(top: float, which: int) -> float:
    """Where the GPUs of a box's first or second process begin; labels are above and below."""
    return top + LABEL_HEIGHT + 3 + which * (CELL_HEIGHT + GAP)


def process(panel: Panel, rank: int, left: float, top: float) -> Iterator[str]:
    """A process: its number and coordinates, and its GPUs with a stage each."""
    pipeline, piece = divmod(rank, panel.slices)
    names = [f"dp {pipeline}"] * (panel.num_boxes == 2) + [f"tp {piece}"] * (panel.slices == 2)
    label = top - 6 if rank % 2 == 0 else top + CELL_HEIGHT + LABEL_HEIGHT - 2
    yield text(left, label, f"process {rank}: {', '.join(names)}", ' font-weight="bold"')
    first_gpu = rank % 2 * NUM_STAGES
    for stage in range(NUM_STAGES):
        x, y = left + stage * (CELL_WIDTH + GAP), top
        size = f'width="{number(CELL_WIDTH)}" height="{number(CELL_HEIGHT)}"'
        place = f'x="{number(x)}" y="{number(y)}"'
        yield f'<rect {place} {size} rx="4" fill="{FILLS[rank]}" stroke="#555"/>'
        middle = ' text-anchor="middle"'
        yield text(x + CELL_WIDTH / 2, y + 14, f"GPU {first_gpu + stage}", middle)
        part = f"stage {stage}, {'ab'[piece]}" if panel.slices == 2 else f"stage {stage}"
        yield text(x + CELL_WIDTH / 2, y + 27, part, middle)
        if stage:
            yield joined(x - GAP, y + CELL_HEIGHT / 2, x, y + CELL_HEIGHT / 2, "pp")


def joined(x: float, y: float, to_x: float, to_y: float, group: str) -> str:
    """A line between members of a group."""
    colour = LINES.get(group, "#555")
    path = f"M{number(x)} {number(y)}L{number(to_x)} {number(to_y)}"
    return f'<path stroke="{colour}" stroke-width="{2 if group in LINES else 1}" d="{path}"/>'


def legend(y: float) -> Iterator[str]:
    """The meaning of each line."""
    words = {
        "pp": "activations, copies of one process",
        "tp": "parts of activations, for every layer",
        "dp": "gradients, once a step",
    }
    x = MARGIN
    for group, meaning in words.items():
        yield joined(x, y - 3, x + 20, y - 3, group)
        yield text(x + 26, y, f"{group}: {meaning}")
        x += 60 + 5.4 * len(meaning)


def main() -> None:
    """Write all of it."""
    for path, content in made().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
