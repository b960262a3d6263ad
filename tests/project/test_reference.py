"""The reference pages, which sphinx fills from docstrings, have every public name."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

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
    first, *parts = name.split(".")
    value: object = import_module(first)
    for number, part in enumerate(parts, 2):
        # A function may have the name of a folder, which an import would put in its place.
        if not hasattr(value, part):
            import_module(".".join(name.split(".")[:number]))
        value = getattr(value, part)
    return value


@pytest.mark.skipif(torch.__version__ < "2.13", reason="pykern.interop.pipelining needs it")
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
