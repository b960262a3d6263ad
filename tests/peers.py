"""Runs a function in several processes at once, which are peers in gloo's default group."""

import io
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

# Forks of one process that has imported torch, and what torch imports when an optimizer is first
# called or tensors are first distributed, which takes each of them seconds else.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "tests.peers",
        "pykern.pipeline",
        "pykern.optimizers.zero",
        "torch._dynamo",
        "torch.distributed.optim",
        "torch.distributed.tensor.parallel",
    ]
)


class Died(Exception):
    """A process ended without a result; `code` is its exit code, negative for a signal."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, rank: int) -> Any:
        return self.function(rank, *self.arguments)


def run(
    num_peers: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 50,
    group_timeout_s: float = 20,
) -> list[Any]:
    """Calls `function(rank, *arguments)` in each of as many processes; returns what they return.

    Raises:
        AssertionError: one of them raised, or died; the message has all tracebacks.
    """
    found = outcomes(
        num_peers, function, *arguments, timeout_s=timeout_s, group_timeout_s=group_timeout_s
    )
    failed = [
        f"process {rank}: {''.join(traceback.format_exception(one))}"
        for rank, one in enumerate(found)
        if isinstance(one, BaseException)
    ]
    assert not failed, "\n".join(failed)
    return found


def outcomes(
    num_peers: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 50,
    group_timeout_s: float = 20,
) -> list[Any]:
    """As `run`; in place of what a process would have returned, what it raised, or `Died`."""
    call = _Call(function, arguments)
    with TemporaryDirectory() as folder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(num_peers)]
        processes = [
            _CONTEXT.Process(
                target=_serve,
                args=(rank, num_peers, Path(folder), group_timeout_s, writer, call),
                daemon=True,
            )
            for rank, (_, writer) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            return _collect([reader for reader, _ in pipes], processes, monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(readers: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    found: list[Any] = [None] * len(readers)
    left = dict(zip(readers, range(len(readers)), strict=True))
    while left:
        ready = wait(list(left), max(deadline - monotonic(), 0))
        if not ready:
            missing = ", ".join(map(str, sorted(left.values())))
            raise TimeoutError(f"no result from process {missing} in time; others: {found}")
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = left.pop(reader)
            try:
                found[rank] = torch.load(io.BytesIO(reader.recv_bytes()), weights_only=False)
            except EOFError:
                processes[rank].join(5)
                found[rank] = Died(processes[rank].exitcode)
    return found


def _serve(
    rank: int,
    num_peers: int,
    folder: Path,
    group_timeout_s: float,
    writer: Connection,
    call: Callable[[int], Any],
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("error")
    # On a busy machine, which says nothing about what is tested.
    warnings.filterwarnings("ignore", "the times of layers differ")
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    store = FileStore(os.fspath(folder / "store"), num_peers)
    timeout = timedelta(seconds=group_timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_peers, timeout=timeout)
    # A process that were through at once could be gone before the others have connected to it.
    dist.barrier()
    try:
        found: Any = call(rank)
    except BaseException as error:
        found = _portable(error)
    data = io.BytesIO()
    torch.save(found, data)
    writer.send_bytes(data.getvalue())
    # Nobody waits for peers that may be dead.
    with suppress(BrokenPipeError):
        writer.close()
    os._exit(0)


def _portable(error: BaseException) -> BaseException:
    """The exception, or where it cannot be sent, one that says what it was; with its traceback."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        other = RuntimeError(repr(error))
        for note in error.__notes__:
            other.add_note(note)
        return other
    return error
