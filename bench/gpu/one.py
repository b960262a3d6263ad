"""Runs one section in this process: python -m bench.gpu.one NAME FILE. Its figures go to the file,
as JSON, and what is too large for figures into the same folder."""

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    file = Path(sys.argv[2])
    section = importlib.import_module(f"bench.gpu.{sys.argv[1]}")
    file.write_text(json.dumps(section.run(file.parent)))
