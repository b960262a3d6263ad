"""Everything that needs a GPU, in three runs of at most nine minutes each, into one JSON file.

    python bench/gpu_session.py correctness --out DIR   # first: what is right, and what is not
    python bench/gpu_session.py graphs --out DIR        # then graph mode
    python bench/gpu_session.py speed --out DIR         # then how fast it is
    python bench/gpu_session.py green pools --out DIR   # these sections only
    python bench/gpu_session.py speed --out DIR --dry-run    # what would run; needs no GPU

Each section is a module of bench/gpu, run in a process of its own, so that one that fails or hangs
takes no other along; what it has started ends with it. Sections that time nothing run side by side.
At its end a section is given a fault, and fails if it does not notice it. Its output is in
DIR/SECTION.log as it comes. DIR/gpu_session.json is written after each section; a later run skips
what is there and succeeded on the same sources, but for the build, which another machine lacks.
Time that sections leave goes to later ones. Several runs can be named at once; what is worth most
comes first.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.gpu import frame  # noqa: E402 - found by the line above

FILE = "gpu_session.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="+", help=f"sections, or a run: {', '.join(frame.RUNS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--limit-s", type=float, default=540, help="stop starting sections by then")
    parser.add_argument("--dry-run", action="store_true", help="import and describe each section")
    return parser.parse_args()


def chosen(what: list[str]) -> dict[str, int]:
    """The sections of these names or runs, with their seconds, in the order of the runs."""
    wanted = [name for given in what for name in frame.RUNS.get(given, [given])]
    if unknown := [name for name in wanted if name not in frame.SECTIONS]:
        known = [*frame.RUNS, *frame.SECTIONS]
        sys.exit(f"what must be runs or sections, got {unknown}. Known are {', '.join(known)}")
    return {name: limit_s for name, limit_s in frame.SECTIONS.items() if name in wanted}


def main() -> int:
    options = arguments()
    sections = chosen(options.what)
    if options.dry_run:
        for name, limit_s in sections.items():
            describe(name, limit_s)
    device = [] if frame.has_device() else ["a CUDA device"]
    if options.dry_run or device:
        for name in sections:
            lacks = [*device, *frame.lacking(name)]
            print(f"{name:15} lacks {', '.join(lacks) or 'nothing'}")
        return 0
    # A caller that is out of patience ends the section as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    return run(sections, options.out, options.limit_s)


def describe(name: str, limit_s: int) -> None:
    """Prints the purpose of a section, unless it cannot be imported."""
    with suppress(ImportError):
        print(f"{name:15} {limit_s:4} s  {frame.purpose(name)}")
        print(f"{'':23} fault: {frame.planted(name)}")


def run(sections: dict[str, int], out: Path, limit_s: float) -> int:
    """Runs sections until the limit; returns 0 where all have succeeded."""
    deadline = time.monotonic() + limit_s
    out.mkdir(parents=True, exist_ok=True)
    path = out / FILE
    session = frame.resume(path, frame.environment())
    done = {name for name, of in session["sections"].items() if of["outcome"] == "ok"} - {"build"}
    for name in sections.keys() & done:
        print(frame.summary(name, session["sections"][name]))
    wanted_s = {
        tuple(batch): max(sections[name] for name in batch)
        for batch in frame.batches(name for name in sections if name not in done)
    }
    for batch in list(wanted_s):
        left_s = deadline - time.monotonic()
        stretch = max(1.0, left_s / sum(wanted_s.values()))
        del wanted_s[batch]
        for name, result in frame.run_sections(batch, out, left_s, stretch):
            session["sections"][name] = result
            frame.save(path, session)
            print(frame.summary(name, result), flush=True)
    print(f"wrote {path}")
    print(json.dumps(session["environment"], indent=2))
    return 0 if all(session["sections"][name]["outcome"] == "ok" for name in sections) else 1


if __name__ == "__main__":
    sys.exit(main())
