"""Runs one section in this process: python -m bench.gpu.one NAME FILE. Its figures go to the file,
as JSON, and what is too large for figures into the same folder. Then the section is given a fault:
one that does not notice it has shown nothing."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from .frame import Json


def figures(section: Any, folder: Path) -> Json:
    """The figures of a section that notices a fault.

    Raises:
        RuntimeError: it does not.
    """
    found: Json = section.run(folder)
    print(json.dumps(found))
    if not section.control():
        raise RuntimeError(
            f"the section does not notice its planted fault: {section.control.__doc__}"
        )
    return found


if __name__ == "__main__":
    file = Path(sys.argv[2])
    section = importlib.import_module(f"bench.gpu.{sys.argv[1]}")
    file.write_text(json.dumps(figures(section, file.parent)))
