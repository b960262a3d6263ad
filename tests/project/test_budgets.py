"""Sizes: a file is read in one sitting, a function on one screen.

A file of the package has at most 300 lines, any other 400. Taste is 35 a function; 60 is the hard
limit. clang-tidy keeps the one for C++ functions. Run with -s to see the largest of each even while
all is well.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_FILE_LINES = 400
MAX_PACKAGE_FILE_LINES = 300
# These are longer still.
LONGER = {
    "pykern/runtime/executor.py",
    "pykern/runtime/random/eager.py",
    "pykern/runtime/recompute/recompute.py",
}
MAX_FUNCTION_LINES = 60
FOLDERS = ("pykern", "schedules", "csrc", "tests", "bench")

Sizes = list[tuple[int, str]]


def files(root: Path, *suffixes: str) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in (root / folder).rglob("*") if path.suffix in suffixes)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from def to end without the docstring, whose length the house style prescribes."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def functions(root: Path) -> Sizes:
    sizes = []
    for path in files(root, ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{path.relative_to(root)}:{node.lineno} {node.name}"
                sizes.append((code_lines(node), place))
    return sizes


def file_sizes(root: Path) -> Sizes:
    return [
        (len(path.read_text().splitlines()), str(path.relative_to(root)))
        # A stub names all that the extension has, whatever that is.
        for path in files(root, ".py", ".cpp", ".hpp", ".sh")
    ]


def package_file_sizes(root: Path) -> Sizes:
    found = [(lines, place) for lines, place in file_sizes(root) if place.startswith("pykern/")]
    assert {place for _, place in found} >= LONGER
    return [(lines, place) for lines, place in found if place not in LONGER]


@pytest.mark.parametrize(
    ("measure", "limit"),
    [
        (file_sizes, MAX_FILE_LINES),
        (package_file_sizes, MAX_PACKAGE_FILE_LINES),
        (functions, MAX_FUNCTION_LINES),
    ],
)
def test_sizes_stay_within_budget(root, measure, limit):
    sizes = sorted(measure(root), reverse=True)
    assert sizes, "nothing was measured"
    print(*(f"{lines:5d} of {limit}  {place}" for lines, place in sizes[:5]), sep="\n")
    assert [place for lines, place in sizes if lines > limit] == []
