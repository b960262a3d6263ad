"""Files that must not be in the tree: it is read on other machines than the one it was written
on."""

import ast
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# Home folders and mounts of one machine, and packages installed from a local file.
MACHINE_PATH = re.compile(r"(?<![\w.~}])/(?:home|root|work|opt|mnt|Users)/\w|file:/{3}")


@pytest.fixture
def tracked(root):
    if shutil.which("git") is None:
        pytest.skip("git is not there to list what is in the tree")
    # The owner of a checkout on a build machine is often another user, which git would refuse.
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    paths = [root / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_path_of_one_machine(root, tracked):
    found = [
        f"{path.relative_to(root)}:{number} {line}"
        for path in tracked
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert len(tracked) > 1
    assert found == []


def test_every_class_has_one_header(root):
    # The linker takes one of two destructors for both classes, and says nothing. The driver's model
    # is a library of its own.
    names = Counter(
        (header.parent.name == "driver_model", name)
        for header in (root / "csrc").rglob("*.hpp")
        for name in re.findall(r"^(?:class|struct) (\w+)[^;]*$", header.read_text(), re.M)
    )
    assert names[False, "Plan"] == names[True, "Model"] == 1
    assert [name for name, count in names.items() if count > 1] == []


# A plan's ring of slots and a collective's ring of GPUs: both are public, and the field's words.
RIGHT_TWICE = {"Ring"}


def types_in(source: Path) -> Iterator[str]:
    """The classes of a module and its aliases of types, which are assigned CamelCase names."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            assigned = [target.id for target in node.targets if isinstance(target, ast.Name)]
            yield from (name for name in assigned if re.fullmatch(r"_*[A-Z]\w*[a-z]\w*", name))


def test_every_type_of_python_has_one_home(root):
    """A name that stands for two things makes a reader look up which: also one of the extension."""
    homes = defaultdict(list)
    for source in [*(root / "pykern").rglob("*.py"), root / "pykern/_C.pyi"]:
        for name in types_in(source):
            homes[name].append(str(source.relative_to(root)))
    assert len(homes["Pipeline"]) == 1
    assert len(homes["Call"]) == 1
    assert {name: where for name, where in homes.items() if len(where) > 1} == {
        name: homes[name] for name in RIGHT_TWICE
    }
    assert [name for name in RIGHT_TWICE if len(homes[name]) != 2] == []
