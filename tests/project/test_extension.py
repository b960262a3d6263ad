"""The face of the extension: what the linters of Python sources cannot see."""

import inspect
import re
from collections.abc import Iterator

import pykern._C

# pybind11 gives its classes a metaclass of their own and its enums a marker; no stub can name them.
UNAVOIDABLE = (
    "is inconsistent, metaclass differs",
    ".__pybind11_native_enum__ is not present in stub",
)
# pybind11 begins a docstring with these lines.
SIGNATURE = re.compile(r"^(\d+\. )?\w+\(.*\) -> .*$|^Overloaded function\.$", re.MULTILINE)


def public_members(owner: object, path: str) -> Iterator[tuple[str, object]]:
    for name, value in vars(owner).items():
        documentable = inspect.isroutine(value) or isinstance(value, type | property | staticmethod)
        if documentable and not name.startswith("_"):
            yield f"{path}.{name}", value
            if isinstance(value, type):
                yield from public_members(value, f"{path}.{name}")


def test_the_stub_equals_the_built_module(python):
    output = python("-m", "mypy.stubtest", "--concise", "pykern._C").stdout
    differences = [line for line in output.splitlines() if not line.endswith(UNAVOIDABLE)]
    assert differences == []


def test_every_public_name_says_what_it_is():
    members = dict(public_members(pykern._C, "pykern._C"))
    assert "pykern._C.Plan.forward_only" in members
    docs = {path: SIGNATURE.sub("", inspect.getdoc(value) or "") for path, value in members.items()}
    assert [path for path, doc in docs.items() if not doc.strip()] == []
