"""What must not be in the tree: it is read on other machines than the one it was written on."""

import re
import shutil
import subprocess
from collections import Counter

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
    # The linker takes one of two destructors for both classes, and says nothing.
    names = Counter(
        name
        for header in (root / "csrc").rglob("*.hpp")
        for name in re.findall(r"^(?:class|struct) (\w+)[^;]*$", header.read_text(), re.M)
    )
    assert names["Plan"] == 1
    assert [name for name, count in names.items() if count > 1] == []
