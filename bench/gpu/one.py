"""Runs one section in this process: python -m bench.gpu.one NAME FOLDER. Its figures are the last
line printed, as JSON."""

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    section = importlib.import_module(f"bench.gpu.{sys.argv[1]}")
    print("\n" + json.dumps(section.run(Path(sys.argv[2]))))
