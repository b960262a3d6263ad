"""Writes the table of features in features.md, which is made of the tests that show them."""

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"(?<=<!-- features -->\n).*?(?=<!-- end of features -->)", re.DOTALL)


def made() -> str:
    """The page with the table of now."""
    sys.path.insert(0, str(ROOT))
    for module in ("test_any_model", "test_any_loop"):
        importlib.import_module(f"tests.features.{module}")
    markdown = importlib.import_module("tests.features.table").markdown()
    return _TABLE.sub(lambda _: markdown, (ROOT / "docs/features.md").read_text())


if __name__ == "__main__":
    (ROOT / "docs/features.md").write_text(made())
