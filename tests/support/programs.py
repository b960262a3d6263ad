"""Programs of tests, each in a process of its own, and none with an import of torch to wait for.

A server that has imported torch, and nothing of pykern, forks a child for each program. The child
leaves the server's function and runs the program in `__main__`, so that it ends as any other.
"""

import atexit
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
# Since Python 3.12 each fork beside threads warns.
QUIET = ("-W", "ignore:This process:DeprecationWarning")
SERVER = """
import torch
from tests.support import programs
exec(programs.served({descriptor}))
"""


# Runs a module as `python -m` does.
MODULE = """
import runpy
runpy.run_module({name!r}, run_name="__main__", alter_sys=True)
"""


def run(
    code: str,
    *arguments: str,
    timeout: float = 60,
    fresh: bool = False,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -c`.

    For programs that import torch before pykern. Variables that Python, the C library or torch
    read when they start need a fresh interpreter.

    Args:
        code: what it runs.
        arguments: in its `sys.argv`.
        timeout: seconds after which it is killed, and `subprocess.TimeoutExpired` is raised.
        fresh: in an interpreter that has imported nothing.
        folder: where it runs, in place of the working directory.
        environment: in place of this process's.
    """
    variables = dict(os.environ if environment is None else environment)
    cwd = folder or Path.cwd()
    # The thread sanitizer gives up on a forked child that starts threads.
    if fresh or "LD_PRELOAD" in os.environ:
        command = [sys.executable, *QUIET, "-c", code, *arguments]
        return subprocess.run(
            command,
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    channel = _server(threading.get_ident())
    asked = {"code": code, "arguments": arguments, "env": variables, "cwd": str(cwd)}
    ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
    socket.send_fds(channel, [json.dumps(asked).encode()], theirs)
    for descriptor in theirs:
        os.close(descriptor)
    child, ended = int(channel.recv(64)), False
    try:
        out, err = _read_all(ours, time.monotonic() + timeout)
        ended = True
    except TimeoutError:
        raise subprocess.TimeoutExpired(code, timeout) from None
    finally:
        for descriptor in ours:
            os.close(descriptor)
        if not ended:
            # It may have left a child that goes on writing.
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        status = int(channel.recv(64))
    return subprocess.CompletedProcess(code, status, out, err)


def _read_all(descriptors: tuple[int, ...], deadline: float) -> list[str]:
    """The texts that are written to each, until nobody can write any more."""
    found = {descriptor: b"" for descriptor in descriptors}
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                found[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
    return [data.decode() for data in found.values()]


@cache
def _server(_thread: int) -> socket.socket:
    """The way to the server of a thread of this process, which ends with the process."""
    # Packets: a message is read as it was sent.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = theirs.fileno()
    server = subprocess.Popen(
        [sys.executable, *QUIET, "-c", SERVER.format(descriptor=descriptor)],
        cwd=ROOT,
        # numpy's library would start threads, which a fork leaves behind.
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        # Pipes, as those of programs: Python asks once whether they can be sought in.
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[descriptor],
    )
    theirs.close()
    assert ours.recv(64) == b"ready", server.communicate()[0].decode()

    def end() -> None:
        ours.close()
        server.communicate()

    atexit.register(end)
    return ours


def served(descriptor: int) -> CodeType:
    """Forks a child for each message; returns in the child alone, with its program.

    The child has the descriptors, the variables and the working directory that were sent.
    """
    channel = socket.socket(fileno=descriptor)
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    # Programs that end look for garbage among their own objects; among torch's it takes a second.
    gc.freeze()
    channel.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            break
        for each in descriptors:
            os.close(each)
        channel.send(str(child).encode())
        channel.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    channel.close()
    for number, each in enumerate(descriptors, 1):
        os.dup2(each, number)
        os.close(each)
    asked = json.loads(message)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv[1:] = asked["arguments"]
    code: CodeType = compile(asked["code"], "<string>", "exec")
    return code
