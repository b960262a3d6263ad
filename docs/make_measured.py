"""Writes the figures of measured.md, and tables of other pages, from bench/results.

Run from anywhere: python docs/make_measured.py. The text between two markers of a page is replaced;
a test compares the pages with what this makes. The newest file of a claim counts, so run this
after `pytest bench --save-results`.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
kept = importlib.import_module("bench.kept")
tables = importlib.import_module("bench.kept_tables")
gpu_tables = importlib.import_module("bench.gpu_tables")
session_tables = importlib.import_module("bench.session_tables")
estimates_table = importlib.import_module("bench.estimates_table")
tuning_tables = importlib.import_module("bench.tuning_tables")
search_grid = importlib.import_module("bench.search_grid")

CLAIMS = (
    *("dispatch", "crossover", "pipeline", "adapters", "plan", "budgets", "stream", "async"),
    *("data_parallel", "import", "streams"),
)
# A claim, pykern's figure, and what it is compared with.
Line = tuple[str, str, str]


def dispatch() -> list[Line]:
    """Steps of tiny stages beside a loop, and where a second worker pays."""
    results = kept.newest("dispatch")
    alone, workers, torchs, beyond = [], [], [], []
    for stages in (1, 2, 4):
        of = results.of(f"{stages} x Linear(16, 16), microbatches 64 x 4 rows, CPU time")
        hand = of["hand loop"]["p20_ms"]
        mine = of["pykern, 1 worker, the loop's order"]
        alone.append(mine["p20_ms"] / hand)
        torchs.append(of["torch runtime, 1 process"]["p20_ms"] / hand)
        beyond.append(tables.us_beyond(mine, of["engine loop"]))
        if stages > 1:
            workers.append(of[f"pykern, {stages} workers"]["p20_ms"] / hand)
    two = kept.newest("crossover").of("2 stages of 2 x Linear(256")
    action, faster = two["hand loop"]["us per action"], two["pykern, 2 workers"]["speed-up"]
    return [
        (
            "CPU time of a step of 1, 2 and 4 stages of `Linear(16, 16)` on one worker, in the "
            "order of the loop",
            f"{_list(alone, '.2f')} x a hand-written loop; {_list(beyond, '.0f')} µs an action "
            "more than a loop that calls the engine of autograd itself",
            f"torch's own schedule runtime in one process: {_list(torchs, '.1f')} x",
        ),
        ("the same of 2 and 4 stages with a worker for each", f"{_list(workers, '.2f')} x", ""),
        (
            f"two stages of {action:.0f} µs per action on two workers",
            f"{faster:.2f} x as fast as the loop",
            f"bound {32 / 17:.2f}",
        ),
    ]


def models() -> list[Line]:
    """Steps of models."""
    of = kept.newest("pipeline").of("small GPT")
    best = {
        who: min(row["median_ms"] for name, row in of.items() if name.startswith(f"{who} "))
        for who in ("pykern", "torch")
    }
    plain = of["plain model, 2 threads, whole batch"]["median_ms"]
    lora = kept.newest("adapters").of("Llama")
    shares = [lora[name]["ratio"] for name in ("LoRA", "LoRA on the last half")]
    return [
        (
            "small GPT, forward and backward, two devices, best schedule of each",
            f"{best['torch'] / best['pykern']:.2f} x as fast",
            "torch.distributed.pipelining, two gloo processes",
        ),
        (
            "the same model, not pipelined, torch's own two threads, whole batch",
            "",
            f"{best['pykern'] / plain:.2f} x as fast as pykern on two workers",
        ),
        (
            "LoRA on a small Llama, on all blocks and on the last half, two workers",
            f"{_list(shares, '.2f')} x the step",
            "its full fine-tune on two workers",
        ),
    ]


def planner() -> list[Line]:
    """Plans, their simulation, and the search."""
    results = kept.newest("plan")
    rows, copies = (results.of(f"{task}, P=64")["torch"] for task in ("generate", "lower"))
    whole = results.of("lower, P=64")["pykern, generated and checked"]
    rates = [
        results.of(start)["simulate, with check"]["million actions/s"]
        for start in ("one_f_one_b P=8", "interleaved P=64")
    ]
    torchs = results.of("simulate, P=8 ")["torch"]["million actions/s"]
    found = searched()
    proven = " (proven optimal)" if found[0]["proven"] else ""
    return [
        (
            "rows, check and copies of interleaved 1F1B, P = 64, M = 1024, 262,144 actions",
            f"{whole['median_ms']:.0f} ms",
            f"torch: {(rows['median_ms'] + copies['median_ms']) / 1e3:.1f} s for rows and copies, "
            "unchecked",
        ),
        (
            "simulation of a plan, its check included",
            f"{rates[0]:.0f} to {rates[1]:.0f} million actions/s",
            f"torch's: {torchs:.1f}",
        ),
        (
            "search at P = 4, M = 8, F = I = W under 0.75 and 0.5 of 1F1B's memory: bubble in "
            "forwards ([all cells](search-grid.md))",
            f"{found[0]['bubble']:.2f}{proven}, {found[1]['bubble']:.2f}",
            "best published: " + ", ".join(f"{each['published_bubble']:.1f}" for each in found),
        ),
    ]


def searched() -> list[dict[str, object]]:
    """The cells of P = 4, M = 8 and equal costs under 0.75 and 0.5 of 1F1B's memory."""
    (file,) = kept.FOLDER.glob("search-grid_*.jsonl")
    _, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    wanted = {"num_devices": 4, "num_microbatches": 8, "costs": "equal"}
    cells = {
        line["cell"]["memory"]: line for line in lines if wanted.items() <= line["cell"].items()
    }
    return [cells[memory] for memory in (0.75, 0.5)]


def memory() -> list[Line]:
    """Budgets of activations."""
    of = kept.newest("budgets").of("GPT")
    shares = (70, 50, 30)
    held = [of[f"{share} % of none"]["peak KiB"] / of["none"]["peak KiB"] for share in shares]
    within = all(100 * share <= most for share, most in zip(held, shares, strict=True))
    return [
        (
            "activations that a device holds at most, 1F1B on 4 workers, under budgets of 70, 50 "
            'and 30 % of those at level "none"',
            f"{_list([100 * share for share in held], '.0f')} %"
            f"{': within each' if within else ': MORE THAN A BUDGET'}",
            "",
        )
    ]


def batches() -> list[Line]:
    """Inference, and training without a flush."""
    stream = kept.newest("stream")
    four, one = (stream.of(f"12 batches of 8 rows, {number} ") for number in (4, 1))

    def faster(contender: str) -> str:
        times = [of[contender]["speed-up"] for of in (four, one)]
        return f"{times[0]:.2f} x ({times[1]:.2f} x)"

    results = kept.newest("async")
    waits = [case for case in results.cases if "that wait" in case]
    ratios = [results.of(case)["pipedream_2bw"]["ratio"] for case in waits]
    return [
        (
            "inference over 12 batches, two stages on two workers, beside the plain model on one "
            "thread (with whole batches as microbatches)",
            f"`pipe.stream`: {faster('pipe.stream, 2 workers')}",
            f"`pipe(batch)` in a loop: {faster('pipe(batch), 2 workers')}; torch's own two "
            f"threads: {faster('plain model, 2 threads')}",
        ),
        (
            "four stages that wait, 4 to 16 microbatches, without a flush (`pipedream_2bw`)",
            f"{min(ratios):.2f} to {max(ratios):.2f} x the step",
            "1F1B with its flush",
        ),
    ]


def beside() -> list[Line]:
    """Sums over processes, imports, and issuing to GPUs."""
    results = kept.newest("data_parallel")
    hidden = [results.of(name)["process_group"]["hidden"] for name in ("one_f_one_b", "zb_h1")]
    started = kept.newest("import").of("a fresh interpreter")
    ours, torchs = (started[name]["ratio"] for name in ("pykern", "torch.distributed.pipelining"))
    issued = kept.newest("streams").of("1F1B")
    ns = {name: row["ns per action"] for name, row in issued.items()}
    return [
        (
            "data parallel, two processes over gloo: sums of gradients that are over before the "
            "last action of the step ends",
            f"{100 * hidden[0]:.0f} % of their time (1F1B), {100 * hidden[1]:.0f} % (`zb_h1`)",
            "",
        ),
        (
            "an interpreter that imports torch and pykern",
            f"{ours:.2f} x torch alone",
            f"torch.distributed.pipelining: {torchs:.2f} x",
        ),
        (
            "issuing an action to GPUs, with its copy, waits, records and launch, on a driver that "
            "does nothing",
            f"{ns['replayed']:.0f} ns replayed",
            f"{ns['called']:.0f} ns with an empty Python function called for it",
        ),
    ]


def figures() -> str:
    """The table of measured.md, with where the results are from below it."""
    parts = (dispatch, models, planner, memory, batches, beside)
    lines = [line for part in parts for line in part()]
    table = [("claim", "pykern", "compared with"), ("---", "---", "---"), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def origins() -> str:
    """The environment of each claim."""
    return "\n".join(f"- {claim}: {kept.newest(claim)}" for claim in CLAIMS)


def _list(values: list[float], form: str) -> str:
    *first, last = (f"{value:{form}}" for value in values)
    return f"{', '.join(first)} and {last}" if first else last


def made() -> dict[str, str]:
    """Each page by its path, with what it has to hold."""
    blocks = {
        "docs/measured.md": {"figures": figures, "origins": origins},
        "bench/README.md": tables.TABLES,
        "docs/gpus.md": gpu_tables.TABLES,
        "docs/gpu-session.md": session_tables.TABLES,
        "docs/memory.md": estimates_table.TABLES,
        "docs/tuning.md": tuning_tables.TABLES,
        "docs/search-grid.md": search_grid.TABLES,
    }
    return {name: filled(name, by_block) for name, by_block in blocks.items()}


def filled(name: str, blocks: Mapping[str, Callable[[], object]]) -> str:
    """A page with each block as it is made now."""
    page = (ROOT / name).read_text(encoding="utf-8")
    for block, make in blocks.items():
        start, end = f"<!-- {block}: made by docs/make_measured.py -->", f"<!-- end of {block} -->"
        before, found, rest = page.partition(start)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"{name} must have the block {start}, got none. Add it, and {end}")
        page = f"{before}{start}\n\n{make()}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    for name, page in made().items():
        (ROOT / name).write_text(page, encoding="utf-8")
