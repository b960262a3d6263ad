"""Daemon threads that are within the extension while Python goes down, and ask for its lock."""

import subprocess
import sys

import pytest

# Python frees this name before all others, when it ends each other thread that asks for the lock.
GOES_DOWN = """
import ctypes, sys, threading, time
import pykern
from pykern import _C
from pykern.search import auto

libc = ctypes.CDLL(None)
class GoesDown:
    def __del__(self, usleep=libc.usleep):
        usleep(500_000)
sys.ps1 = GoesDown()
begun = threading.Event()

def search():
    begun.set()
    auto(4, 16, memory=0.5, budget_ms=60_000)

def make():
    made = []
    begun.set()
    while True:
        made.append(_C.WorkerExecutor(64))
        made.pop().close()
"""
THREADS = {
    "that searches": "threading.Thread(target=search, daemon=True).start()",
    "that makes executors": "threading.Thread(target=make, daemon=True).start()",
}


@pytest.mark.parametrize("name", THREADS)
def test_a_daemon_thread_does_not_end_the_process(name: str) -> None:
    code = f"{GOES_DOWN}\n{THREADS[name]}\nbegun.wait()\ntime.sleep(0.3)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
