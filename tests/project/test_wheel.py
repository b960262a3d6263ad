"""The package that a user installs."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    built = python("-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    assert built.returncode == 0, built.stdout
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_link_to_the_schedules_is_relative(root):
    link = root / "pykern" / "schedules"
    assert link.is_symlink()
    assert link.readlink() == Path("../schedules")


@pytest.mark.timeout(120)
def test_the_source_distribution_holds_all_that_a_wheel_is_built_from(root, python, tmp_path):
    built = python("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path)
    assert built.returncode == 0, built.stdout
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
    names = {member.name.partition("/")[2] for member in members}

    kinds = {".cpp", ".hpp", ".cmake", ".py", ".pyi", ".typed"}
    folders = ("csrc", "cmake", "pykern")
    sources = [path for folder in folders for path in (root / folder).rglob("*")]
    schedules = (root / "schedules").glob("*.py")
    expected = {path.relative_to(root).as_posix() for path in sources if path.suffix in kinds}
    expected |= {f"pykern/schedules/{path.name}" for path in schedules}
    expected |= {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"}
    assert expected - names == set()
    assert not [name for name in names if name.startswith((".venv", "build/", "dist/"))]


# Where another Python has built last, as on the other stacks, all bindings are compiled again.
@pytest.mark.timeout(1200)
def test_the_wheel_holds_the_package_and_nothing_else(root, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    package = root / "pykern"
    sources = [*package.rglob("*.py"), package / "_C.pyi", package / "py.typed"]
    sources += [*package.rglob("*.html"), *package.rglob("*.json")]
    schedules = (root / "schedules").glob("*.py")
    expected = {path.relative_to(root).as_posix() for path in sources}
    expected |= {f"pykern/schedules/{path.name}" for path in schedules}
    expected |= {f"pykern/_C{EXTENSION_SUFFIXES[0]}", "pykern/libpykern_driver_model.so"}
    info = wheel.name.partition("-cp")[0] + ".dist-info"
    for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"):
        expected.add(f"{info}/{name}")
    assert sorted(names) == sorted(expected)


def form_of(printed):
    """The lines of an output without their numbers and the widths of columns."""
    lines = re.sub(r"\[[\d, ]+\]|-?\d[\d.,]*", "0", printed).splitlines()
    return [" ".join(line.split()) for line in lines]


@pytest.mark.timeout(1200)
def test_a_newcomers_first_tasks_print_what_the_page_shows(root, wheel, tmp_path):
    (tmp_path / "dist").mkdir()
    shutil.copy(wheel, tmp_path / "dist")
    (tmp_path / "docs").symlink_to(root / "docs")
    alone = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    printed = ""
    page = (root / "docs/first-tasks.md").read_text()
    for kind, block in re.findall(r"^```(sh|text)\n(.*?)^```", page, re.M | re.S):
        if kind == "text":
            assert form_of(printed) == form_of(block)
            printed = ""
            continue
        # The packages that pykern needs are those of this Python: an index may have a torch with
        # CUDA only, of which 2.7 GB would be downloaded in each run.
        done = subprocess.run(
            ["bash", "-euc", block],
            cwd=tmp_path,
            env=alone | {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}"
        printed += done.stdout
        (site,) = tmp_path.glob("env/lib/python*/site-packages")
        # On the other stacks, a folder has torch and another the rest.
        needed = [path for path in sys.path if path.endswith("site-packages")]
        (site / "needed.pth").write_text("\n".join(needed))
    assert not printed
