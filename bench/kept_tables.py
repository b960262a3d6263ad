"""The tables of README.md, made of the results that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .kept import FOLDER, Results, Row, newest


class Table(NamedTuple):
    """Where the results are from, and rows below headings."""

    results: Results
    headings: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        sides = ["--:" if cell[:1].isdigit() else "---" for cell in self.rows[0]]
        lines = (f"| {' | '.join(cells)} |" for cells in (self.headings, sides, *self.rows))
        return f"From {self.results}:\n\n" + "\n".join(lines)


def shown(value: float) -> str:
    """With three digits, or all before the point."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def timed(row: Row) -> str:
    """The median with the percentiles."""
    return f"{shown(row['median_ms'])} ({shown(row['p20_ms'])} to {shown(row['p80_ms'])})"


def judged(row: Row) -> str:
    """The ratio with the verdict."""
    return f"{row['ratio']:.2f} {row.verdict}".removesuffix(" BASELINE")


def contenders(claim: str, cases: Mapping[str, str], figures: Iterable[str] = ()) -> Table:
    """A row for each contender.

    Args:
        claim: Its newest results.
        cases: By heading, how the case of these columns begins.
        figures: Names of the figures that have a column.
    """
    results = newest(claim)
    headings, columns = ["contender"], []
    for label, start in cases.items():
        headings += [f"{label} ms (20 to 80 %)".lstrip(), "ratio", *figures]
        columns.append(results.of(start))
    rows = [
        [name, *(cell for column in columns for cell in _cells(column[name], figures))]
        for name in columns[0]
    ]
    return Table(results, headings, rows)


def _cells(row: Row, figures: Iterable[str]) -> list[str]:
    told = row.records[0].figures
    return [
        timed(row),
        judged(row),
        *(shown(row[name]) if name in told else "" for name in figures),
    ]


def dispatch() -> Table:
    """By stages; times at the 20th percentile, and CPU time beyond two loops by action."""
    results = newest("dispatch")
    headings = ["stages", "contender", "ms of CPU", "x hand loop", "x hand loop by the wall"]
    headings += ["µs per action beyond the engine loop", "beyond the loop that keeps strides"]
    rows = []
    for case in results.cases:
        if not case.endswith("CPU time"):
            continue
        of, by_wall = results.of(case), results.of(case.replace("CPU time", "wall time"))
        loops = [of["engine loop"], of["engine loop, strides kept"]]
        for name, row in of.items():
            times = [f"{row['p20_ms']:.2f}", *(_of_loop(each, name) for each in (of, by_wall))]
            beyond = [f"{us_beyond(row, loop):.1f}" if row is not loop else "" for loop in loops]
            rows.append([case.split()[0], name, *times, *beyond])
    return Table(results, headings, rows)


def _of_loop(of: Mapping[str, Row], name: str) -> str:
    """The time of a contender as a multiple of the hand-written loop's, at the 20th percentile."""
    return f"{of[name]['p20_ms'] / of['hand loop']['p20_ms']:.2f}"


def us_beyond(row: Row, loop: Row) -> float:
    """The CPU time of an action beyond that of a loop, at the 20th percentile."""
    num_actions = 1e3 * row["median_ms"] / row["us per action"]
    return 1e3 * (row["p20_ms"] - loop["p20_ms"]) / num_actions


def instructions() -> Table:
    """A row for each contender, in instructions."""
    headings = ["case", "contender", "instructions per action", "beyond the loop", "x the loop"]
    file = max(FOLDER.glob("instructions_*.jsonl"), key=lambda file: file.stem.rpartition("_")[2])
    header, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    rows = [
        [
            of["case"],
            of["contender"],
            f"{of['instructions']:,}",
            f"{of['beyond']:,}",
            f"{of['ratio']:.2f}",
        ]
        for of in lines
    ]
    return Table(Results((header,), {}), headings, rows)


def features() -> Table:
    """A row for each feature beside its loop, by CPU time at the 20th percentile."""
    results = newest("features")
    rows = []
    for case in results.cases:
        of = results.of(case)
        loop, row = of["engine loop"], of["pykern, 1 worker"]
        times = [f"{each['p20_ms']:.2f}" for each in (loop, row)]
        name = case.partition(", microbatches")[0]
        rows.append([name, *times, f"{us_beyond(row, loop):.1f}"])
    return Table(results, ["case", "loop ms of CPU", "pykern ms", "µs per action beyond"], rows)


def crossover() -> Table:
    """A row for each width."""
    results = newest("crossover")
    rows = []
    for case in results.cases:
        of = results.of(case)
        width = re.findall(r"Linear\((\d+)", case)
        two = of["pykern, 2 workers"]
        times = [shown(row["median_ms"]) for row in of.values()]
        action, faster = of["hand loop"]["us per action"], two["speed-up"]
        rows.append([*width, f"{action:.0f}", *times, f"{faster:.2f}"])
    times = ["hand loop ms", "1 worker ms", "2 workers ms"]
    headings = ["width", "µs per action", *times, "speed-up of 2 workers over the loop"]
    return Table(results, headings, rows)


def waits() -> Table:
    """Schedules without a flush, on stages that wait."""
    results = newest("async")
    rows = []
    for case in results.cases:
        found = re.fullmatch(r"4 stages that wait .*, (\d+) microbatches", case)
        if found:
            for name, row in results.of(case).items():
                rows.append([found[1], name, timed(row), judged(row), f"{row['busy']:.2f}"])
    headings = ["microbatches", "contender", "ms (20 to 80 %)", "ratio", "busy"]
    return Table(results, headings, rows)


def without_a_flush() -> Table:
    """The same schedules on a GPT in two stages on two workers."""
    results = newest("async")
    rows = []
    for case in results.cases:
        found = re.match(r"GPT, 2 stages, (\d+) microbatches", case)
        if found:
            for name, row in results.of(case).items():
                rows.append([found[1], name, timed(row), judged(row)])
    return Table(results, ["microbatches", "contender", "ms (20 to 80 %)", "ratio"], rows)


def pipeline() -> str:
    """Contenders, and how many times as fast as one thread the best schedules of pykern are."""
    of = newest("pipeline").of("small GPT")
    one_thread = of["plain model, 1 thread, 8 microbatches"]["median_ms"]
    faster, interleaved = (
        one_thread / of[f"pykern {name}"]["median_ms"]
        for name in ("one_f_one_b, 2 stages", "interleaved, 4 stages")
    )
    return (
        f"{contenders('pipeline', {'': 'small GPT'}, ['tokens/s'])}\n\n"
        "Beside one thread and 8 microbatches the bound of 1F1B is 8 / 9 · 2 = 1.78 and that of "
        "interleaved 16 / 17 · 2 = 1.88.\n"
        f"There pykern is {faster:.2f} and {interleaved:.2f} times as fast."
    )


def streams() -> Table:
    """The issue of a step to GPUs, by the step and by the action."""
    results = newest("streams")
    rows = [
        [name, f"{1e3 * row['median_ms']:,.0f}", shown(row["ns per action"])]
        for name, row in results.of("1F1B P=8 M=64").items()
    ]
    return Table(results, ["step of 1F1B, P = 8, M = 64", "µs", "ns per action"], rows)


def imports() -> Table:
    """A fresh interpreter that imports, and ends."""
    results = newest("import")
    rows = [
        [name, timed(row), judged(row), shown(row["ms beyond torch"])]
        for name, row in results.of("a fresh interpreter").items()
    ]
    return Table(results, ["imported", "ms (20 to 80 %)", "ratio", "ms beyond torch"], rows)


def data_parallel() -> Table:
    """Sums over processes behind the step and within it."""
    results = newest("data_parallel")
    rows = []
    for case in results.cases:
        schedule = case.partition(",")[0]
        for name, row in results.of(case).items():
            hidden = row.records[0].figures.get("hidden")
            share = "" if hidden is None else f"{100 * row['hidden']:.0f} %"
            rows.append([f"`{schedule}`", name, timed(row), judged(row), share])
    headings = ["schedule", "sums", "ms (20 to 80 %)", "ratio"]
    return Table(results, [*headings, "sums over before the last action ends"], rows)


def replicas() -> Table:
    """Replicas and stages on two and four workers."""
    results = newest("replicas")
    rows = []
    for workers in (2, 4):
        tiny, gpt = (results.of(f"{model}, {workers} ") for model in ("tiny", "small gpt"))
        for name, row in tiny.items():
            rows.append([f"{workers}", name, judged(row), timed(gpt[name]), judged(gpt[name])])
    headings = ["workers", "replicas x stages", "tiny stages, ratio"]
    return Table(results, [*headings, "small GPT, ms (20 to 80 %)", "ratio"], rows)


def plans() -> Table:
    """Tasks of the planner beside torch's."""
    results = newest("plan")
    rows = []
    for label, start in (
        ("rows (ours are checked too)", "generate, P=64"),
        ("check (torch's looks at each rank alone)", "check, P=64"),
        ("copies (ours with ring slots)", "lower, P=64"),
        ("simulation, P=8 M=256 (8,192 actions)", "simulate, P=8 "),
    ):
        of = results.of(start)
        times = [shown(of[name]["median_ms"]) for name in ("torch", "pykern")]
        rows.append([label, *times, f"{of['pykern']['times as fast']:.0f}"])
    whole = results.of("lower, P=64")["pykern, generated and checked"]
    rows.insert(3, ["rows, copies and both checks", "", shown(whole["median_ms"]), ""])
    headings = ["task, P=64 M=1024 (262,144 actions)", "torch ms", "pykern ms", "times as fast"]
    return Table(results, headings, rows)


TABLES: Mapping[str, Callable[[], Table | str]] = {
    "plan": plans,
    "dispatch": dispatch,
    "features": features,
    "instructions": instructions,
    "crossover": crossover,
    "peers": lambda: contenders(
        "peers", {"tiny": "4 x Linear", "GPT": "GPT"}, ["us beyond, per action"]
    ),
    "levels": lambda: contenders("levels", {"GPT": "GPT", "Llama": "Llama"}, ["peak MiB"]),
    "budgets": lambda: contenders(
        "budgets", {"": "GPT"}, ["peak KiB", "predicted KiB", "predicted ms"]
    ),
    "adapters": lambda: contenders("adapters", {"": "Llama"}),
    "async": waits,
    "async_gpt": without_a_flush,
    "pipeline": pipeline,
    "stream": lambda: contenders(
        "stream",
        {"4 microbatches": "12 batches of 8 rows, 4 ", "1 microbatch": "12 batches of 8 rows, 1 "},
    ),
    "to_torch": lambda: contenders("to_torch", {"": "small GPT"}),
    "data_parallel": data_parallel,
    "replicas": replicas,
    "streams": streams,
    "import": imports,
}
