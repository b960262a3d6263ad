"""Issues the calls of a log to the fake driver: python -m tests.driver_log.replay LOG.

Objects that the log's calls made are made again. Torch's objects have stand-ins: graphs that touch
what the captured ones did, and work that touches the same bytes on the same streams.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.fake_cuda.fake import NON_BLOCKING, Access, load

NOT_READY = 600
UNIFIED = 4
_LINE = re.compile(r"1 (cu\w+)(.*) = (\d+)")
_OBJECT = re.compile(r"(\*?)([a-z]+)(\d+)")
_ACCESS = re.compile(r" ([rw]) (buffer\d+\+\d+):(\d+)")


class Replayed(NamedTuple):
    """The fake driver's answers.

    Attributes:
        num_calls: calls that were issued.
        differences: those that ended otherwise than in the log.
        violations: rules that were broken.
    """

    num_calls: int
    differences: list[str]
    violations: list[str]


def replay(log: str) -> Replayed:
    """Issues all calls of a log to a fresh model of one device, which is left as it is then.

    Raises:
        ValueError: the log has a line that is not of its form, or calls of several threads.
    """
    player = _Player()
    for line in log.splitlines():
        player.play(line)
    count = player.library.fake_violations()
    violations = [player.library.fake_violation(i).decode() for i in range(count)]
    return Replayed(player.num_calls, player.differences, violations)


def waits(log: str) -> list[int]:
    """The numbers of the lines in which a stream waits for an event, in their order."""
    return [n for n, line in enumerate(log.splitlines()) if " cuStreamWaitEvent " in line]


def without(log: str, number: int) -> str:
    """The log without one of its lines."""
    lines = log.splitlines(keepends=True)
    return "".join(lines[:number] + lines[number + 1 :])


def without_wait_of_copy(log: str) -> str:
    """The log of called actions or graphs, where the last copy does not wait for its source."""
    copy = max(n for n, line in enumerate(log.splitlines()) if " cuMemcpyAsync " in line)
    return without(log, max(wait for wait in waits(log) if wait < copy))


class _Player:
    def __init__(self) -> None:
        self.library = load()
        self.num_calls = 0
        self.differences: list[str] = []
        self._buffers: dict[str, Any] = {}
        self._told: list[tuple[str, Any]] = []
        self._objects: dict[str, int] = {}
        self.library.fake_reset(1, 0)
        self.library.fake_allow_undeclared(1)
        self._call("cuInit", 0)
        self._context = self._made("cuDevicePrimaryCtxRetain", 0)
        self._call("cuCtxSetCurrent", self._context)
        # Handle 0 is torch's default stream.
        self._objects["stream0"] = self._torch_stream()
        self.library.fake_make_default(self._objects["stream0"])

    def play(self, line: str) -> None:
        if found := _LINE.fullmatch(line):
            self._play_call(line, *found.groups())
        elif found := re.fullmatch(r"buffers((?: \d+)*) *", line):
            for number, size in enumerate(found[1].split(), 1):
                self._buffers[f"buffer{number}"] = ctypes.create_string_buffer(int(size))
        elif found := re.fullmatch(r"1 work (\S+) (stream\d+)(.*)", line):
            accesses = self._accesses(found[3])
            self.library.fake_kernel(self._object(found[2]), 1000, accesses, len(accesses))
        elif found := re.fullmatch(r"1 captured \*(graph|exec)(\d+)(.*)", line):
            self._objects[found[1] + found[2]] = self._captured(found[1], found[3])
        elif line == "1 synchronized":
            self._call("cuCtxSetCurrent", self._context)
            self._call("cuCtxSynchronize")
        elif re.fullmatch(r"1 step \d+", line):
            self.library.fake_begin_step()
        elif not re.fullmatch(r"#.*|1 (?:update|close)", line):
            raise ValueError(f"log must have lines of calls of one thread, got {line!r}")

    def _play_call(self, line: str, function: str, arguments: str, result: str) -> None:
        words = arguments.split()
        if function == "cuCtxGetCurrent":
            # It is torch that may have made another one current since.
            self._call("cuCtxSetCurrent", self._object(words[0].removeprefix("*")))
        self._told.clear()
        given = [argument for word in words for argument in self._arguments(word)]
        now = self._call(function, *given)
        self.num_calls += 1
        for name, told in self._told:
            self._objects[name] = told.value or 0
        waiting = function == "cuEventQuery" and {now, int(result)} <= {0, NOT_READY}
        if now != int(result) and not waiting:
            self.differences.append(f"{line}, and now {now}")

    def _arguments(self, word: str) -> list[Any]:
        """The arguments of a call that a word of the log stands for."""
        if found := _OBJECT.fullmatch(word):
            if not found[1]:
                is_null = found[3] == "0"
                return [None if is_null else ctypes.c_void_p(self._object(word))]
            told = ctypes.c_void_p()
            if found[3] != "0":
                self._told.append((found[2] + found[3], told))
            return [ctypes.byref(told)]
        if found := re.fullmatch(r"\((.*)\)", word):
            nodes = [self._object(name) for name in found[1].split(",") if name]
            return [(ctypes.c_void_p * len(nodes))(*nodes), ctypes.c_size_t(len(nodes))]
        if found := re.fullmatch(r"copy\((\S+),(\S+),(\d+)\)", word):
            return [_copy(self._address(found[1]), self._address(found[2]), int(found[3]))]
        return [self._value(word)]

    def _value(self, word: str) -> Any:
        if word.startswith("buffer"):
            return ctypes.c_ulonglong(self._address(word))
        if ">" in word:
            return ctypes.byref(ctypes.c_int(int(word.partition(">")[0])))
        if word.startswith("~"):
            return ctypes.byref(ctypes.c_float())
        if word == "text":
            return ctypes.create_string_buffer(256)
        if not re.fullmatch(r"-?\d+", word):
            raise ValueError(f"log must have calls that can be replayed, got an argument {word!r}")
        return ctypes.c_longlong(int(word))

    def _address(self, name: str) -> int:
        buffer, _, offset = name.partition("+")
        return ctypes.addressof(self._buffers[buffer]) + int(offset)

    def _object(self, name: str) -> int:
        if name == "ctx0":
            return 0
        if name not in self._objects:
            makes: dict[str, Callable[[], int]] = {
                "ctx": lambda: self._context,
                "stream": self._torch_stream,
            }
            kind = name.rstrip("0123456789")
            if kind not in makes:
                raise ValueError(f"log must have the making of each object, got no {name}")
            self._objects[name] = makes[kind]()
        return self._objects[name]

    def _torch_stream(self) -> int:
        return self._made("cuStreamCreateWithPriority", NON_BLOCKING, 0)

    def _captured(self, kind: str, accesses: str) -> int:
        found = self._accesses(accesses)
        graph = int(self.library.fake_make_mix_graph(1000, 0, found, len(found)))
        if kind == "graph":
            return graph
        self._call("cuCtxSetCurrent", self._context)
        return self._made("cuGraphInstantiateWithFlags", ctypes.c_void_p(graph), 0)

    def _accesses(self, text: str) -> Any:
        found = [
            Access(self._address(place), int(size), kind == "w")
            for kind, place, size in _ACCESS.findall(text)
        ]
        return (Access * len(found))(*found)

    def _made(self, function: str, *arguments: Any) -> int:
        made = ctypes.c_void_p()
        error = self._call(function, ctypes.byref(made), *arguments)
        assert error == 0, f"{function} failed with {error}"
        return made.value or 0

    def _call(self, function: str, *arguments: Any) -> int:
        address = self.library.fake_function(function.encode())
        given = [
            ctypes.c_void_p(argument) if isinstance(argument, int) else argument
            for argument in arguments
        ]
        return ctypes.CFUNCTYPE(ctypes.c_int)(address)(*given)


def _copy(to: int, source: int, num_bytes: int) -> Any:
    """A CUDA_MEMCPY3D_v2: for each end x, y, z, level, kind, four pointers, pitch and height."""
    ends = [(0, 0, 0, 0, UNIFIED, 0, end, 0, 0, 0, 0) for end in (source, to)]
    packed = struct.pack("@4QI6Q4QI6Q3Q", *ends[0], *ends[1], num_bytes, 1, 1)
    return ctypes.create_string_buffer(packed, len(packed))


if __name__ == "__main__":
    print(json.dumps(replay(Path(sys.argv[1]).read_text())._asdict()))
