"""Writes docs/reliability.md: the promises, their campaigns, and the latest results.

Run from anywhere: python docs/make_reliability.py. The figures are those that
`python -m tests.torture --save` has kept; a test compares the page with what this makes.
"""

import importlib
import json
import sys
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
    return _HEAD + "\n".join(rows) + "\n\n" + "\n".join(parts) + "\n" + _where(kept)


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


def _where(kept: dict[str, dict[str, Any] | None]) -> str:
    found = {
        f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, torch {where['torch']}"
        for figures in kept.values()
        if figures is not None
        for where in (figures["environment"],)
    }
    return "Figures were taken on " + "; ".join(sorted(found)) + ".\n"


if __name__ == "__main__":
    PAGE.write_text(made())
