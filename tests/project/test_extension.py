"""The face of the extension: what linters of Python sources cannot see."""

import ast
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pykern._C

# pybind11 gives its classes a metaclass of their own and its enums a marker; no stub can name them.
UNAVOIDABLE = (
    "is inconsistent, metaclass differs",
    ".__pybind11_native_enum__ is not present in stub",
)
# pybind11 begins a docstring with such a line.
SIGNATURE = re.compile(r"^\w+(\(.*\) -> .*)$", re.MULTILINE)


def public_members(owner: object, path: str) -> Iterator[tuple[str, object]]:
    """Classes, functions and methods under their full names."""
    for name in vars(owner):
        value = inspect.getattr_static(owner, name)
        callable_here = inspect.isroutine(value) or isinstance(value, type)
        if callable_here and (name == "__init__" or not name.startswith("_")):
            yield f"{path}.{name}", getattr(owner, name)
            if isinstance(value, type):
                yield from public_members(value, f"{path}.{name}")


def defined(body: list[ast.stmt], path: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{path}.{node.name}")
        elif isinstance(node, ast.FunctionDef):
            yield f"{path}.{node.name}", node


def parameters(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """Names of the parameters, and the defaults of the last of them."""
    arguments = function.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    return names, [ast.unparse(default) for default in arguments.defaults]


def built_parameters(signature: str) -> tuple[list[str], list[str]]:
    (function,) = ast.parse(f"def f{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return parameters(function)


MEMBERS = dict(public_members(pykern._C, "pykern._C"))
DOCS = {path: inspect.getdoc(value) or "" for path, value in MEMBERS.items()}


# The stub names a class of the package, which imports torch, matplotlib and IPython. To read those
# took 12 seconds of processor time, on a busy machine longer than a test may take.
STUB_ALONE = "[mypy]\nfollow_imports = skip\n"


def test_the_stub_names_what_was_built(python, tmp_path):
    (settings := tmp_path / "mypy.ini").write_text(STUB_ALONE)
    stubtest = ("-m", "mypy.stubtest", "--concise", "--mypy-config-file", settings)
    output = python(*stubtest, "pykern._C").stdout
    differences = [line for line in output.splitlines() if not line.endswith(UNAVOIDABLE)]
    assert differences == []


def test_the_stub_has_the_parameters_of_what_was_built(root):
    # stubtest cannot see them: pybind11 tells them in docstrings only.
    stub = dict(defined(ast.parse((root / "pykern/_C.pyi").read_text()).body, "pykern._C"))
    built = {path: SIGNATURE.match(doc) for path, doc in DOCS.items()}
    signatures = {path: match[1] for path, match in built.items() if match and path in stub}
    assert "pykern._C.Plan.__init__" in signatures
    written = {path: parameters(stub[path]) for path in signatures}
    assert written == {path: built_parameters(text) for path, text in signatures.items()}


def test_every_public_name_says_what_it_is():
    undocumented = [
        path
        for path, doc in DOCS.items()
        if not path.endswith("__init__") and not SIGNATURE.sub("", doc).strip()
    ]
    assert undocumented == []


def test_libraries_export_nothing_of_the_c_library():
    # Where libstdc++ is linked statically, torch would find its symbols here and crash.
    folder = Path(pykern._C.__file__).parent
    for library in (pykern._C.__file__, folder / "libpykern_driver_model.so"):
        command = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", str(library)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert found
        assert [name for name in found if name.startswith("_")] == []
