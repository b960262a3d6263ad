"""Makes the tables of docs/published-rates.md: published throughput beside what `scale` predicts.

Run from anywhere: python docs/make_published.py. The text between two markers of the page is
replaced; a test compares the page with what this makes.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pykern.scale import DGX_A100, Job, Layout, Mesh, Part, Transformer, predict
from pykern.scale.work import works

PAGE = Path(__file__).parent / "published-rates.md"
HIGHER = 0.8


class Run(NamedTuple):
    """A row of a paper: its inputs and its figure, a rate or a time."""

    name: str
    job: Job
    layout: Layout
    num_chunks: int
    published: float


def gpt(num_layers: int, width: int, heads: int) -> Transformer:
    """A model of both papers."""
    return Transformer(num_layers, width, sequence=2048, vocabulary=51_200, heads=heads)


def weak(name: str, sizes: tuple[int, int, int], batch: int, microbatch: int, *of: int) -> Run:
    """A row of Narayanan et al.: shards, devices, GPUs, chunks, TFLOP/s of a GPU."""
    tensor, pipeline, num_gpus, num_chunks, rate = of
    job = Job(gpt(*sizes), batch, microbatch, recompute="layer")
    layout = Layout(num_gpus // (tensor * pipeline), tensor, pipeline)
    return Run(name, job, layout, num_chunks, rate)


NARAYANAN = (
    weak("1.7B", (24, 2304, 24), 512, 16, 1, 1, 32, 1, 137),
    weak("3.6B", (30, 3072, 32), 512, 16, 2, 1, 64, 1, 138),
    weak("7.5B", (36, 4096, 32), 512, 16, 4, 1, 128, 1, 142),
    weak("18B", (40, 6144, 48), 1024, 8, 8, 1, 256, 1, 135),
    weak("39B", (48, 8192, 64), 1536, 4, 8, 2, 512, 1, 138),
    weak("76B", (60, 10_240, 80), 1792, 2, 8, 4, 1024, 3, 140),
    weak("145B", (80, 12_288, 96), 2304, 2, 8, 8, 1536, 2, 148),
    weak("310B", (96, 16_384, 128), 2160, 1, 8, 16, 1920, 2, 155),
    weak("530B", (105, 20_480, 128), 2520, 1, 8, 35, 2520, 3, 163),
    weak("1T", (128, 25_600, 160), 3072, 1, 8, 64, 3072, 1, 163),
)


def timed(run: Run, seconds: float, *, again: bool) -> Run:
    """A row of Korthikanti et al.: with full recompute, or with their own work."""
    job = replace(
        run.job,
        recompute="layer" if again else "scores",
        sequence_parallel=not again,
        overlap_sums=True,
    )
    return run._replace(job=job, published=seconds)


# Name, sizes, batch, microbatch, devices, chunks, seconds with full recompute, with their work.
TABLE_5 = (
    ("22B", (48, 6144, 64), 4, 4, 1, 1, 1.42, 1.10),
    ("175B", (96, 12_288, 96), 64, 1, 8, 3, 18.13, 13.75),
    ("530B", (105, 20_480, 128), 280, 1, 35, 3, 49.05, 37.83),
    ("1T", (128, 25_600, 160), 512, 1, 64, 1, 94.42, 71.49),
)


def korthikanti() -> list[Run]:
    """Table 5, and the run of section 6.3 with eight pipelines."""
    runs = []
    for name, sizes, batch, microbatch, pipeline, chunks, *seconds in TABLE_5:
        run = weak(name, sizes, batch, microbatch, 8, pipeline, 8 * pipeline, chunks, 0)
        runs += [timed(run, seconds[0], again=True), timed(run, seconds[1], again=False)]
    eight = weak("530B", (105, 20_480, 128), 2240, 1, 8, 35, 2240, 3, 0)
    return [*runs, timed(eight, 39.15, again=False)]


# Korthikanti et al., table 4: forward and backward of a layer of 22B, in milliseconds.
TABLE_4 = (
    ("nothing", "none", False, 7.7, 11.9),
    ("nothing, sequence parallel", "none", True, 7.2, 11.8),
    ("the layer", "layer", False, 7.7, 19.5),
    ("scores", "scores", False, 7.7, 13.2),
    ("scores, sequence parallel", "scores", True, 7.2, 13.1),
)


def step_s(run: Run, efficiency: float = DGX_A100.gpu.efficiency) -> float:
    """Predicted seconds of a step."""
    cluster = replace(DGX_A100, gpu=replace(DGX_A100.gpu, efficiency=efficiency))
    if run.num_chunks == 1:
        return predict(run.job, cluster, run.layout, "one_f_one_b").step_ns / 1e9
    options = {"num_chunks": run.num_chunks}
    return predict(run.job, cluster, run.layout, "interleaved", options=options).step_ns / 1e9


def tera_per_gpu(run: Run) -> float:
    """Operations of a step as Narayanan et al. count, equation 3: layers four times, in 1e12."""
    (whole,) = run.job.model.parts(1)
    layers = replace(whole, has_head=False)
    head = whole.weight_flops - layers.weight_flops
    tokens = run.job.batch * run.job.model.sequence
    of_token = 4 * (layers.weight_flops + layers.score_flops) + 3 * head
    return tokens * of_token / run.layout.num_gpus / 1e12


def needed(run: Run, published_s: float, predicted_s: float) -> float:
    """The share of peak that products would have to reach for the published time.

    A step is about linear in the time of its products; a second prediction gives the slope.
    """
    first, second = 1 / DGX_A100.gpu.efficiency, 1 / HIGHER
    slope = (step_s(run, HIGHER) - predicted_s) / (second - first)
    return 1 / (first + (published_s - predicted_s) / slope)


def inputs(run: Run) -> list[str]:
    """The first cells of a row."""
    counts = (run.layout, run.num_chunks, run.job.microbatch)
    return [run.name, f"{run.layout.num_gpus:,}", *map(str, counts)]


def rates() -> list[list[str]]:
    """Table 1 of Narayanan et al."""
    rows = []
    for run in NARAYANAN:
        found_s, tera = step_s(run), tera_per_gpu(run)
        rate = tera / found_s
        needs = needed(run, tera / run.published, found_s)
        figures = [f"{run.published:g}", f"{rate:.0f}", f"{rate / run.published - 1:+.0%}"]
        rows.append([*inputs(run), *figures, f"{needs:.2f}"])
    return rows


def times() -> list[list[str]]:
    """Table 5 of Korthikanti et al."""
    rows = []
    for run in korthikanti():
        found_s = step_s(run)
        needs = needed(run, run.published, found_s)
        how = "layers" if run.job.recompute == "layer" else "scores"
        figures = [f"{run.published:.2f}", f"{found_s:.2f}", f"{found_s / run.published - 1:+.0%}"]
        rows.append([*inputs(run), how, *figures, f"{needs:.2f}"])
    return rows


def layers() -> list[list[str]]:
    """Table 4 of Korthikanti et al."""
    job, mesh = Job(gpt(48, 6144, 64), 4, 4, overlap_sums=True), Mesh(DGX_A100, Layout(1, 8, 1))
    rows = []
    for name, recompute, parallel, forward, backward in TABLE_4:
        how = replace(job, recompute=recompute, sequence_parallel=parallel)
        (work,) = works(how, mesh, [Part(job.model, 1, embeds=False, has_head=False)])
        row = [name]
        for published, found_ns in ((forward, work.forward_ns), (backward, work.backward_ns)):
            found = found_ns / 1e6
            row += [f"{published:g}", f"{found:.1f}", f"{found / published - 1:+.0%}"]
        rows.append(row)
    return rows


INPUTS = ["model", "GPUs", "dp x tp x pp", "chunks", "microbatch"]
FOUND = ["predicted", "difference"]
TABLES = {
    "table layers": (
        ["computed again", "forward ms", *FOUND, "backward ms", *FOUND],
        layers,
    ),
    "table rates": ([*INPUTS, "TFLOP/s", *FOUND, "needs"], rates),
    "table times": ([*INPUTS, "computed again", "seconds", *FOUND, "needs"], times),
}


def made() -> str:
    """The page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, (headings, rows) in TABLES.items():
        lines = [headings, ["---:"] * len(headings), *rows()]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        block = rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)"
        page, found = re.subn(block, table, page, flags=re.DOTALL)
        if not found:
            raise ValueError(f"{PAGE.name} must have a block of {name}")
    return page


if __name__ == "__main__":
    PAGE.write_text(made(), encoding="utf-8")
