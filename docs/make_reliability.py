"""Writes docs/reliability.md: the promises, their campaigns, and the latest results.

Run from anywhere: python docs/make_reliability.py. The figures are those that
`python -m tests.torture --save` and `python -m tests.mutate --save` have kept; a test compares the
page with what this makes.
"""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reliability.md"

_HEAD = """\
# Reliability

pykern makes the promises below. Each promise has a campaign of random cases that tries to break it.
A seed and a number make a case; some campaigns have a last case. A case that fails is printed with
the command that reproduces the failure.

    make torture                                       every campaign, for a minute or so each
    make torture TORTURE="--seconds 600"               for longer
    make torture TORTURE="plans --cases 100000"        one campaign with a number of cases
    .venv/bin/python -m tests.torture runs --save      keeps the figures for this page

`make test` runs a part of each campaign. It also checks that each campaign detects a deliberate
defect (`tests/torture/test_controls.py`). A figure other than 0 failures is a known defect.

The models of timm, torchvision and torch_geometric are tried where these are installed:
`.venv/bin/python -m pip install --no-deps timm torchvision==0.28.0 torch_geometric xxhash requests
urllib3 charset_normalizer certifi`. `pytest -m nightly tests/zoo/test_many.py` runs the models
one by one.

The tests of the runtime also run under sanitizers:
`tests/sanitize.sh thread tests/runtime --timeout 300`, or `address`, which looks for undefined
behaviour as well. The command fails if a sanitizer reports anything.

| campaign | cases | failures | seconds | when | commit |
|---|--:|--:|--:|---|---|
"""


def made() -> str:
    """The page, from the saved figures."""
    sys.path.insert(0, str(ROOT))
    main = importlib.import_module("tests.torture.__main__")
    kept = {name: _figures(name) for name in main.NAMES}
    rows = [_row(name, figures) for name, figures in kept.items()]
    parts = [_part(name, main.promise(name), figures) for name, figures in kept.items()]
    where = _where([figures for figures in kept.values() if figures is not None])
    page = _HEAD + "\n".join(rows) + "\n\n" + "\n".join(parts) + "\n" + where
    return page + "\n" + _mutants()


def _figures(name: str) -> dict[str, Any] | None:
    path = ROOT / f"tests/torture/results/{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _row(name: str, figures: dict[str, Any] | None) -> str:
    if figures is None:
        return f"| [{name}](#{name}) | not run | | | | |"
    where = figures["environment"]
    return (
        f"| [{name}](#{name}) | {figures['cases']:,} | {len(figures['failures'])} "
        f"| {figures['seconds']:,.0f} | {where['date']} | {where['commit']} |"
    )


def _part(name: str, promise: str, figures: dict[str, Any] | None) -> str:
    lines = [f"## {name}", "", promise, ""]
    if figures is not None:
        lines += [
            f"`{figures['environment']['command']}`",
            "",
            "| counted | how often |",
            "|---|--:|",
        ]
        lines += [f"| {key} | {count:,} |" for key, count in sorted(figures["counts"].items())]
        lines += [""]
    return "\n".join(lines)


_MUTANTS = """\
## Deliberate faults

`python -m tests.mutate` puts one fault at a time into a copy of the GPU path: a wait that is left
out, an event of another context, a slot that two microbatches share, a batch that no replay reads.
The tests of that part, on the fake driver, must fail. Tests that take too long count only if they
end in time without the fault. A fault that no test can notice is proven harmless in the
[tables](../tests/mutate/__main__.py). `python -m tests.mutate --rest --save` runs faults that have
no outcome yet. Outcomes are kept one by one, so they may be of several runs: the commit is that of
the last, and tests may have been added in between.

| file | faults | noticed | harmless | unnoticed | not run |
|---|--:|--:|--:|--:|--:|
"""


def _mutants() -> str:
    main = importlib.import_module("tests.mutate.__main__")
    kept = json.loads(main.RESULTS.read_text())
    of_file: dict[str, Counter[str]] = {}
    survivors = []
    for mutant in main.MUTANTS:
        outcome = kept["outcomes"].get(mutant.name, {"outcome": "not run"})["outcome"]
        if outcome == "survived":
            survivors.append(f"- `{mutant.name}`: {mutant.harmless or 'a gap in the tests'}")
            outcome = "harmless" if mutant.harmless else "unnoticed"
        of_file.setdefault(mutant.file, Counter())[outcome] += 1
    columns = ("killed", "harmless", "unnoticed", "not run")
    rows = [
        (file, [count.total(), *(count[key] for key in columns)]) for file, count in of_file.items()
    ]
    rows.append(("all", [sum(column) for column in zip(*(row for _, row in rows), strict=True)]))
    lines = [f"| {file} | {' | '.join(map(str, row))} |" for file, row in rows]
    where = kept["environment"]
    lines += ["", "Not noticed, and why:", "", *survivors, ""]
    lines += [f"`{where['command']}`, {where['date']}, commit {where['commit']}.", ""]
    return _MUTANTS + "\n".join(lines) + _where([kept])


def _where(kept: list[dict[str, Any]]) -> str:
    found = {
        f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, torch {where['torch']}"
        for figures in kept
        for where in (figures["environment"],)
    }
    return "Figures were taken on " + "; ".join(sorted(found)) + ".\n"


if __name__ == "__main__":
    PAGE.write_text(made())
