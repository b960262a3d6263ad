"""The reference pages, which sphinx fills from docstrings, have every public name."""

import re
from functools import reduce
from importlib import import_module
from pathlib import Path

import pykern

# Modules for users that are not among the packages which `import pykern` gives.
FURTHER = (
    "budget",
    "interop.fairscale",
    "interop.pipelining",
    "interop.torchgpipe",
    "plan.drawing",
    "plan.files",
    "profiling",
    "sizes",
    "tuning",
)


def told(root: Path) -> set[str]:
    """The names that the pages have docstrings of."""
    pages = [page.read_text() for page in (root / "docs/reference").glob("*.md")]
    return set(re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)$", "\n".join(pages), re.M))


def value_of(name: str) -> object:
    """The object of a dotted name, whose first part is a package."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[length:], module)
    raise AssertionError(name)


def test_every_public_name_is_on_a_reference_page(root):
    names = told(root)
    values = [id(value_of(name)) for name in names]
    public = [
        f"pykern{package}.{name}"
        for package in ("", *(f".{each}" for each in (*sorted(pykern._PACKAGES), *FURTHER)))
        for name in getattr(import_module(f"pykern{package}"), "__all__", ())
    ]
    assert len(public) > 150
    # Some objects have a second name, such as `pykern.Plan`: one of the two is enough.
    assert [name for name in public if name not in names and id(value_of(name)) not in values] == []
