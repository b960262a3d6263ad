"""Everything that needs a GPU, in two calls of under nine minutes, into one JSON file.

    python bench/gpu_session.py --out DIR                          # all sections
    python bench/gpu_session.py --out DIR --sections green,pools   # these only
    python bench/gpu_session.py --out DIR --dry-run                # what would run; needs no GPU

Each section is a module of bench/gpu, run in a process of its own, so that one that fails or hangs
takes no other along. DIR/gpu_session.json is written after each; a later call skips what is there
and succeeded on the same sources. Sections that are named share the time among themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.gpu import frame  # noqa: E402 - found by the line above

FILE = "gpu_session.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--sections", help="names with commas between; all without it")
    parser.add_argument("--limit-s", type=float, default=540, help="stop starting sections by then")
    parser.add_argument("--dry-run", action="store_true", help="import and describe each section")
    return parser.parse_args()


def chosen(names: str | None) -> list[str]:
    """The sections of that list, in the order of the session."""
    wanted = list(frame.SECTIONS) if names is None else names.split(",")
    unknown = [name for name in wanted if name not in frame.SECTIONS]
    if unknown:
        sys.exit(f"unknown sections {unknown}: the sections are {', '.join(frame.SECTIONS)}")
    return [name for name in frame.SECTIONS if name in wanted]


def main() -> int:
    options = arguments()
    names = chosen(options.sections)
    if options.dry_run:
        for name in names:
            print(f"{name:15} {frame.SECTIONS[name]:4} s  {frame.purpose(name)}")
    if not frame.has_device():
        for name in names:
            print(f"{name:15} skipped: no CUDA device")
        return 0
    if options.dry_run:
        return 0
    deadline = time.monotonic() + options.limit_s
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / FILE
    session = frame.resume(path, frame.environment())
    stretch = max(1.0, options.limit_s / sum(frame.SECTIONS[name] for name in names))
    for name in names:
        if session["sections"].get(name, {}).get("outcome") != "ok":
            left_s = deadline - time.monotonic()
            session["sections"][name] = frame.run_section(name, options.out, left_s, stretch)
            frame.save(path, session)
        print(frame.summary(name, session["sections"][name]), flush=True)
    print(f"wrote {path}")
    print(json.dumps(session["environment"], indent=2))
    return 0 if all(session["sections"][name]["outcome"] == "ok" for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
