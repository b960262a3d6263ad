"""Messages between processes are read as data, and refused if they are malformed."""

import ast
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pykern
from pykern.budget.level_costs import HeldBytes, LevelCost, Rebuilt, StageCosts
from pykern.parallel.peers import texts
from pykern.parallel.peers.agreement import require_alike
from pykern.parallel.peers.exchange import PeerMessage
from pykern.parallel.peers.first import of_first
from pykern.partition import Partition
from pykern.plan import Kind
from pykern.plan.files.typed_json import from_text, to_text
from tests import peers

PACKAGE = Path(pykern.__file__).parent
HELD = HeldBytes({Kind.F: 1.5}, {}, {(Kind.B, 2): 3.0})
COSTS = StageCosts(
    {"none": LevelCost(1, 2.5, 3, held=HELD)}, {"layer": Rebuilt(float("inf"), 0, 1e-300)}, 7
)
CUT = Partition((range(2), range(2, 5)), (3, 4), (5, 2**70), ("é", "b", "c", "d", "e"), "time")


@dataclass(frozen=True)
class Pair:
    left: int
    right: tuple[str, ...]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, 3),
        (str, "\ud7ff\n"),
        (bool, True),
        (type(None), None),
        (Pair, Pair(1, ("a", "b"))),
        (list[StageCosts], [COSTS, COSTS]),
        (Partition, CUT),
        (dict[str, str], {"torch": "2"}),
        (tuple[int, str], (1, "x")),
    ],
)
def test_values_come_back_equal(kind: Any, value: object) -> None:
    found = from_text(kind, to_text(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (int, "true", "the value must be a int, got True"),
        (int, "1.5", "must be a int"),
        (float, '"1"', "must be a float"),
        (Pair, '{"left": 1}', r"must have the keys \['left', 'right'\]"),
        (Pair, '{"left": 1, "left": 2, "right": []}', "keys must occur once, got 'left' twice"),
        (Pair, '{"left": 1, "right": [2]}', r"right\[0\] must be a str, got 2"),
        (Pair, "[1, []]", "the value must be a dict"),
        (list[int], '{"0": 1}', "must be a list"),
        (range, "[1, 2, 3]", "must be a list of 2"),
        (dict[str, str], '{"a": null}', "the value.a must be a str, got None"),
        (list[int], "[" * 100_000, "the JSON must have at most .* levels, got more"),
        (int, "gASVKAAAAAAAAACMBXBvc2l4", "text must be JSON, got 'g' at line 1, column 1"),
        (int, "", "text must be JSON, got its end"),
    ],
)
def test_other_values_are_refused(kind: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_text(kind, text)


@pytest.mark.parametrize("numbers", [(-1, 0, 0, 0), (0, -1, 0, 0), (0, 0, 2, 0), (0, 0, 0, -1)])
def test_a_message_that_pykern_does_not_send_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(pykern.PeerError, match="is not understood here"):
        PeerMessage.from_bytes(struct.pack("<4q", *numbers).ljust(512, b"\0"))


def broadcasts(data: bytes) -> None:
    """As the first process sends a text, whatever it is."""
    dist.broadcast(torch.tensor([len(data)]), src=0)
    dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0)


def hears(rank: int, data: bytes) -> str:
    if rank == 0:
        broadcasts(data)
        return ""
    world = dist.group.WORLD
    assert world is not None
    with pytest.raises(pykern.PeerError) as caught:
        of_first_in(world)
    return str(caught.value)


def of_first_in(world: Any) -> None:
    """With the group itself in place of one for what the host has to know."""
    with (
        mock.patch("pykern.parallel.peers.first.control_group", lambda group: group),
        mock.patch("pykern.parallel.peers.first.give_back"),
    ):
        of_first([world], lambda: 3, int)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04\x95pickle\x94.", "bytes that are not UTF-8"),
        (b"cos\nsystem\n(S'true'\ntR.", "is not understood here: the text must be JSON, got 'c'"),
        (b'{"found": "[]", "failure": ""}', "is not understood here: the value must be a int"),
        (b'{"found": "3", "failure": "", "more": 1}', "must have the keys"),
    ],
)
def test_what_the_first_process_sends_is_never_unpickled(data: bytes, message: str) -> None:
    _, told = peers.run(2, hears, data)
    assert message in told


def agrees(rank: int, strange: str) -> str:
    world = dist.group.WORLD
    assert world is not None
    if rank == 1:
        texts.texts_of_all(strange, world)
        return ""
    with pytest.raises(pykern.PeerError) as caught:
        require_alike(world, {"torch": "2"})
    return str(caught.value)


def test_what_is_compared_is_never_unpickled() -> None:
    told, _ = peers.run(2, agrees, '{"torch": ["2"]}')
    assert "process 1 of the group sent a message that is not understood here" in told
    assert "must be a str" in told


def announces(rank: int, size: int) -> str:
    world = dist.group.WORLD
    assert world is not None
    if rank == 0:
        dist.broadcast(torch.tensor([size]), src=0)
        return ""
    with pytest.raises(pykern.PeerError) as caught:
        texts.text_of("", world, 0)
    return str(caught.value)


@pytest.mark.parametrize("size", [-1, 2**40])
def test_a_size_that_no_text_has_allocates_nothing(size: int) -> None:
    _, told = peers.run(2, announces, size)
    assert f"a text must have 1 to {1 << 26} bytes, got {size} from process" in told


# Functions that run, or may run, a program in the data.
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "consolidate_state_dict"),
}


def forbidden_in(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
            found += sorted(names & FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += sorted({(node.module or "").partition(".")[0]} & FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += sorted({node.func.id} & FORBIDDEN_CALLS)
        elif isinstance(node, ast.Attribute):
            found += sorted({node.attr} & (FORBIDDEN_METHODS | {"load_lua", "pickle_module"}))
            if ast.unparse(node) == "torch.load":
                found.append("torch.load")
    return found


def test_the_package_reads_nothing_that_could_run() -> None:
    sources = sorted(PACKAGE.rglob("*.py"))
    assert len(sources) > 100
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sources
        if (names := forbidden_in(ast.parse(path.read_text())))
    }
    # A rehearsal hands on the call of the script, which then loads to the CPU in place of a GPU.
    # Lines that call what a forward has called are made of numbers and quoted names of modules.
    assert found == {
        "rehearse/on_cpu.py": ["torch.load"],
        "trace/cut_tape.py": ["exec", "compile"],
        "trace/whole_stage.py": ["exec", "compile"],
    }


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal",
        "from pickle import loads",
        "eval('1')",
        "dist.all_gather_object(a, b)",
        "x = torch.load(f, weights_only=False)",
        "self._zero.consolidate_state_dict(to=0)",
    ],
)
def test_what_could_run_is_found(source: str) -> None:
    assert forbidden_in(ast.parse(source))


def test_what_cannot_run_is_not_found() -> None:
    source = "model.eval(); re.compile('x'); torch.compile(m); json.load(f); state.load(f)"
    assert forbidden_in(ast.parse(source)) == []
