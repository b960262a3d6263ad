"""Runs campaigns, each in a process of its own, and says what came of them.

python -m tests.torture                      all of them, a minute or so each
python -m tests.torture plans --cases 100000 this one, so many cases
python -m tests.torture --save               keeps the figures for docs/reliability.md
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.report import environment

from .campaign import Campaign, Figures, run

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ROOT = HERE.parents[1]

# In the order in which the page tells of them.
NAMES = ("plans", "runs", "faults", "lines", "sigints", "exits", "files", "limits", "models")


def promise(name: str) -> str:
    """The promise that the campaign of that name tries to break."""
    return load(name).promise


def load(name: str) -> Campaign:
    """The campaign of that name."""
    campaign = import_module(f"tests.torture.{name}").CAMPAIGN
    assert isinstance(campaign, Campaign)
    return campaign


def command(options: argparse.Namespace, name: str) -> str:
    """The command that repeats these cases."""
    said = f"python -m tests.torture {name} --seed {options.seed}"
    return said + (f" --cases {options.cases}" if options.cases is not None else "")


def run_here(options: argparse.Namespace, name: str, folder: Path) -> None:
    """Runs a campaign in this process; what came of it is a file of the folder."""
    import torch  # noqa: PLC0415 - not needed by the process that starts others

    torch.set_num_threads(1)
    campaign = load(name)
    seconds = campaign.seconds if options.seconds is None else options.seconds
    with (folder / f"{name}.number").open("wb", buffering=0) as file:
        figures = run(
            campaign,
            options.seed,
            options.first,
            cases=options.cases,
            seconds=seconds,
            note=lambda number: os.pwrite(file.fileno(), f"{number:<20}".encode(), 0),
        )
    (folder / f"{name}.number").unlink()
    save(folder, name, command(options, name), figures)


def save(folder: Path, name: str, said: str, figures: Figures) -> None:
    content = {"environment": environment(said), "campaign": name, **vars(figures)}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def run_apart(options: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """Runs a campaign in a process of its own, whose end by a signal is a failure of its case."""
    arguments = ["--seed", str(options.seed), "--first", str(options.first), "--here", str(folder)]
    for option in ("cases", "seconds"):
        value = getattr(options, option)
        arguments += [] if value is None else [f"--{option}", str(value)]
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.torture", name, *arguments],
        cwd=ROOT,
        check=False,
    )
    if ended.returncode:
        number = (folder / f"{name}.number").read_text().strip() or str(options.first)
        figures = Figures(options.seed, failures={int(number): f"ended with {ended.returncode}"})
        save(folder, name, command(options, name), figures)
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def tell(name: str, found: dict[str, Any]) -> None:
    """Prints the figures, and each failure with how to see it again."""
    failures = found["failures"]
    said = f"{len(failures)} FAILED" if failures else "ok"
    print(f"{name:8} {found['cases']:9,} cases {found['seconds']:8.1f} s  {said}")
    for key, count in sorted(found["counts"].items()):
        print(f"    {count:9,}  {key}")
    for number, text in failures.items():
        print(text)
        print(
            f"again: python -m tests.torture {name} --seed {found['seed']} --first {number} "
            "--cases 1",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.torture", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=float, help="for each campaign")
    parser.add_argument("--cases", type=int, help="so many, however long they take")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="keep the figures")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"names must be among {NAMES}, got {', '.join(sorted(unknown))}")
    if options.here is not None:
        run_here(options, options.names[0], options.here)
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = RESULTS if options.save else Path(scratch)
        for name in options.names or NAMES:
            found = run_apart(options, name, folder)
            tell(name, found)
            failed += len(found["failures"])
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
