"""A machine that lacks something is told so in one line, before or instead of a traceback."""

import functools
import http.server
import runpy
import shutil
import subprocess
import sys
import sysconfig
import threading
import zipfile
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def check(root):
    return SimpleNamespace(**runpy.run_path(str(root / "environment/check.py")))


@pytest.fixture(scope="module")
def install(root):
    return SimpleNamespace(**runpy.run_path(str(root / "environment/install.py")))


def test_a_fit_machine_is_told_nothing(check, capsys):
    assert check.main("c++") == 0
    assert capsys.readouterr().err == ""


def test_an_old_python_is_named(check, monkeypatch):
    assert check.old_python() is None
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    line = check.old_python()
    assert line.startswith("pykern needs Python 3.11 or newer, and ")
    assert line.endswith(" is 3.10.4. Name another: make PYTHON=python3.13")


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_missing_modules_are_named_with_their_package(check, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert "the package python3-venv" in check.no_venv()


def test_missing_headers_are_named_with_their_package(check, monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert check.no_headers() == (
        f"pykern needs Python's headers, {tmp_path}/Python.h is missing "
        "(Debian: the package python3-dev)."
    )


@pytest.mark.parametrize(
    ("command", "reason"), [("no-such-compiler", "cannot be started"), ("false", "is older")]
)
def test_a_compiler_that_will_not_do_is_named(check, command, reason):
    line = check.no_compiler(command)
    assert f"'{command}' {reason}" in line
    assert "the package g++" in line


def test_a_small_disk_is_named_with_what_is_needed(check, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1.25e9))
    line = check.no_room()
    assert "takes 3 to 7 GB" in line
    assert "has 1.2 GB free" in line


def test_everything_that_is_missing_is_told_at_once(check, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert check.main("no-such-compiler") == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


# Logs of pip 24 to 26 on machines without disk space, network, proxy or certificate.
LOGS = {
    "Could not install packages due to an OSError: [Errno 28] No space left on device": "disk",
    "HTTPSConnectionPool(): Max retries exceeded (Caused by ProxyError('Cannot connect'))": "proxy",
    "Max retries exceeded (Caused by SSLError(SSLCertVerificationError(1, '[SSL: ...')))": (
        "certificate"
    ),
    "NameResolutionError(\"Failed to resolve 'index.example'\")": "network",
    "ERROR: No matching distribution found for torch>=2.11": "lacks a package",
    "error: subprocess-exited-with-error": "pip has failed.",
}


@pytest.mark.parametrize("log", LOGS)
def test_what_pip_wrote_is_told_in_a_line(install, log):
    assert LOGS[log] in install.meaning(log)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--index-url", "http://127.0.0.1:1/simple"], "The package index cannot be reached"),
        (["--index-url", "https://index.example/simple", "--proxy", "http://127.0.0.1:1"], "proxy"),
    ],
)
def test_a_failed_installation_ends_in_one_clear_line(python, options, line):
    done = python("environment/install.py", *options, "--retries", "0", "no-such-package-at-all")
    assert done.returncode == 1
    assert line in done.stdout.splitlines()[-1]


@pytest.fixture
def served_wheel(tmp_path, monkeypatch):
    """The address of a wheel so large that pip would draw a bar."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with zipfile.ZipFile(tmp_path / "large-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("large.py", "#" * 100_000)
        wheel.writestr(
            "large-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: large\nVersion: 1\n"
        )
        wheel.writestr("large-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr("large-1.dist-info/RECORD", "")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/large-1-py3-none-any.whl"
        server.shutdown()
        thread.join()


def test_an_installation_without_a_terminal_draws_no_bars(python, served_wheel):
    options = (
        "--isolated",
        "--disable-pip-version-check",
        "--dry-run",
        "--no-cache-dir",
        "--no-deps",
    )
    done = python("environment/install.py", *options, served_wheel)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_new_module_is_installed(root, tmp_path):
    """The installed package has a table of modules, and would look for one that has moved."""
    shutil.copy(root / "Makefile", tmp_path)
    for name in ("CMakeLists.txt", "cmake/nvtx.cmake", "pyproject.toml", "constraints/cpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("csrc", "pykern", "schedules", ".venv"):
        (tmp_path / name).mkdir()

    def make(option):
        return subprocess.run(["make", option, "setup"], cwd=tmp_path, check=False).returncode

    assert make("--touch") == 0
    assert make("--question") == 0
    (tmp_path / "pykern/new.py").touch()
    assert make("--question") == 1
