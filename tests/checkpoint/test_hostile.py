"""Files that are damaged or forged are refused, whatever they say, and change nothing."""

import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pykern import checkpoint
from pykern.checkpoint import CheckpointError
from pykern.plan.files.json_form import checksum
from tests.checkpoint import forging
from tests.checkpoint.forging import Index
from tests.checkpoint.runs import Run, plain, same


@pytest.fixture
def run(tmp_path) -> Run:
    run = plain()
    run.train(1)
    checkpoint.save(tmp_path / "run.ckpt", **run.parts(), extra={"a": [1, (2.5, None)]}, grads=True)
    return run


@pytest.fixture
def file(run, tmp_path) -> Path:
    return tmp_path / "run.ckpt"


def expect_refused(file: Path, run: Run, message: str | None = None) -> None:
    run.train(1)
    before = run.states()
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(file, **run.parts())
    assert same(run.states(), before)


def settings(index: Index, part: str = "optimizer") -> Any:
    """The pairs of a part's dict; the optimizer's are those of its first group."""
    if part != "optimizer":
        return index[part]["dict"]
    return dict(index["optimizer"]["dict"])["param_groups"][0]["dict"]


def put(pairs: list[Any], key: str, value: Any) -> None:
    pairs[:] = [pair for pair in pairs if pair[0] != key] + [[key, value]]


FORGED: dict[str, tuple[Callable[[Index], object], str]] = {
    "version": (lambda i: i.update(version=2), "version must be 1, got 2"),
    "version of another type": (lambda i: i.update(version=True), "version must be 1, got True"),
    "format": (lambda i: i.update(format="plan"), "format must be 'pykern-checkpoint', got 'plan'"),
    "unknown key": (lambda i: i.update(hooks=[]), "must have known keys only, got 'hooks'"),
    "missing key": (lambda i: i.pop("rng"), "must have the key 'rng', got none"),
    "no tensors": (
        lambda i: i.update(tensors=3),
        "the index must name the tensors that the file holds, got other names. The file is damaged",
    ),
    "a tensor less": (
        lambda i: i["tensors"].pop("0.bias"),
        "the index must name the tensors that the file holds, got other names. The file is damaged",
    ),
    "dtype": (
        lambda i: i["tensors"]["0.bias"].update(dtype="int8"),
        "tensor '0.bias' is not as it was saved. The file is damaged",
    ),
    "digest": (
        lambda i: i["tensors"]["0.bias"].update(sha256="0"),
        "tensor '0.bias' is not as it was saved. The file is damaged",
    ),
    "names": (
        lambda i: i["model"].update(x="0.bias"),
        "the model must have the same names in the file, got 'x' only in the file",
    ),
    "another's tensor": (
        lambda i: i["model"].update({"0.bias": "0.weight"}),
        r"0.bias must be float32 \[6\], as it is here, got float32 \[6, 6\] in the "
        r"file",
    ),
    "no such tensor": (
        lambda i: i["model"].update({"0.bias": "x"}),
        "the file must hold tensor 'x', got a file without it. The file is damaged",
    ),
    "no table": (
        lambda i: i.update(model=[1]),
        r"model must be a table of names in the file, got "
        r"\[1\]",
    ),
    "no keys": (
        lambda i: i["model"].update({"0.bias": []}),
        "model must be a table of names in the file, got",
    ),
    "no model": (
        lambda i: i.update(model=None),
        "model must be a table of names in the file, got None",
    ),
    "a gradient of nothing": (
        lambda i: i["grads"].update({"x": "0.bias"}),
        "a gradient must be of a parameter of the model, got one of 'x' in the file",
    ),
    "a gradient of a shape": (
        lambda i: i["grads"].update({"0.bias": "0.weight"}),
        r"the gradient of 0.bias must be float32 \[6\], as it is here, got",
    ),
    "a learning rate": (
        lambda i: put(settings(i), "lr", "fast"),
        "lr must be a number, as it is here, got a string in the file:",
    ),
    "an infinite number": (
        lambda i: put(settings(i), "lr", 1e999),
        "a value of a checkpoint must be in a form that save writes, got",
    ),
    "a pair": (
        lambda i: settings(i).append(["lr"]),
        r"an entry of a dict must be a pair of key and "
        r"value, got \['lr'\]",
    ),
    "a key twice": (
        lambda i: settings(i).append(["lr", 1]),
        "keys of a dict must occur once, got one twice in",
    ),
    "a tag": (
        lambda i: put(settings(i), "lr", {"object": "os"}),
        "a value of a checkpoint must be in a form that save writes, got",
    ),
    "two tags": (
        lambda i: put(settings(i), "lr", {"tuple": [], "dict": []}),
        "a value of a checkpoint must be in a form that save writes, got",
    ),
    "parameters": (
        lambda i: put(settings(i), "params", [3]),
        "must have a list of names in the file, got",
    ),
    "state of nothing": (
        lambda i: put(dict(i["optimizer"]["dict"])["state"]["dict"], "x", {"dict": []}),
        "the optimizer's state must be of parameters that it trains, got state of 'x'",
    ),
    "state of a shape": (
        lambda i: put(
            dict(i["optimizer"]["dict"])["state"]["dict"][1][1]["dict"],
            "exp_avg",
            {"tensor": "0.weight"},
        ),
        r"the optimizer's exp_avg of 0.bias must have .* float32 \[6\], got float32 \[6, 6\]",
    ),
    "no state": (
        lambda i: i.update(optimizer={"dict": []}),
        "optimizer must be of the class that was saved, None, got AdamW",
    ),
    "a list of states": (
        lambda i: i.update(optimizer=[1]),
        "optimizer must be of the class that was saved, None, got AdamW",
    ),
    "an attribute": (
        lambda i: put(settings(i, "scheduler"), "optimizer", 1),
        "the scheduler must have the same names in the file, got 'optimizer' only in the file",
    ),
    "an attribute's kind": (
        lambda i: put(settings(i, "scheduler"), "last_epoch", "x"),
        "last_epoch must be a number, as it is here, got a string in the file:",
    ),
    "a counter": (
        lambda i: put(settings(i, "scheduler"), "milestones", {"counter": [[2, 1], ["x", 1]]}),
        r"a Counter must count ints, got \('x', 1\)",
    ),
    "a scale": (
        lambda i: put(settings(i, "scaler"), "scale", None),
        "scale must be a number, as it is here, got a .* in the file:",
    ),
    "a large scale": (
        lambda i: put(settings(i, "scaler"), "scale", 1e300),
        "scale of the scaler must be .* got 1e[+]300",
    ),
    "a large count": (
        lambda i: put(settings(i, "scaler"), "_growth_tracker", 2**70),
        "_growth_tracker of the scaler must be .* got 1180591620717411303424",
    ),
    "random numbers": (lambda i: i.update(rng=[1]), r"the random state must be a dict, got \[1\]"),
    "a generator less": (
        lambda i: settings(i, "rng").pop(),
        "the random state must have the same names in the file, got .* only here",
    ),
    "torch's state": (
        lambda i: put(settings(i, "rng"), "torch", "AAAA"),
        "the state of the torch generator is invalid: .*. Load with rng=False",
    ),
    "no text": (
        lambda i: put(settings(i, "rng"), "torch", 3),
        "the state of the torch generator is invalid: .*. Load with rng=False",
    ),
    "no base64": (
        lambda i: put(settings(i, "rng"), "torch", "\xe9"),
        "the state of the torch generator is invalid: .*. Load with rng=False",
    ),
    "Python's state": (lambda i: put(settings(i, "rng"), "python", {"dict": []}), "the python gen"),
    "cuda's states": (
        lambda i: put(settings(i, "rng"), "cuda", 3),
        "the state of the cuda generator is invalid: .*. Load with rng=False",
    ),
    "numpy's position": (
        lambda i: put(dict(settings(i, "rng"))["numpy"]["dict"], "position", 10**6),
        "state of the numpy generator is invalid: .* got 624 words and position 1000000",
    ),
    "nesting": (lambda i: i.update(extra=nested(900)), "levels, got more"),
    # Above what is read, below what Python would take.
    "less nesting": (lambda i: i.update(extra=nested(250)), "levels, got more"),
}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_index_is_refused(file, run, name):
    change, message = FORGED[name]
    forging.forge(file, change)
    expect_refused(file, run, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"version":1', '"version":1,"version":1'), "once, got .* twice"),
        (lambda text: text.replace("2.5", "NaN"), "numbers of JSON must be finite, got NaN"),
        (lambda text: text.replace("2.5", "3.5"), "sha256 must be"),
        (lambda text: text.replace("2.5", "9" * 5000), "be as it was saved, got a changed one"),
        (lambda text: text[:-1], "the index must be as it was saved, got a changed one"),
        (lambda _: "[]", r"the index must be a JSON object, got \[\]"),
        (lambda _: "[" * 100_000, "levels, got more"),
    ],
)
def test_an_index_that_is_no_index_is_refused(file, run, change, message):
    forging.forge_text(file, change)
    expect_refused(file, run, message)


def test_files_of_others_are_refused(file, run, tmp_path):
    header, data = forging.header_of(file)
    for metadata in (None, {}, {"format": "pt"}, {**header["__metadata__"], "more": "x"}):
        forging.write(file, {**header, "__metadata__": metadata}, data)
        expect_refused(file, run)
    for content in (b"", b"\x80\x05pickle", struct.pack("<Q", 2**63) + b"{}", b"\0" * 100):
        file.write_bytes(content)
        expect_refused(file, run, "is not a checkpoint, or a damaged one")
    with pytest.raises(CheckpointError, match="path must be a regular file, got"):
        checkpoint.load(tmp_path, run.model)
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none", run.model)


@pytest.mark.parametrize("key", ["__metadata__", "5.bias"])
def test_a_header_that_repeats_a_key_is_refused(file, run, key):
    header, data = forging.header_of(file)
    text = json.dumps(header)[:-1] + f", {json.dumps(key)}: {json.dumps(header[key])}}}"
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)
    expect_refused(file, run, f"damaged one: keys must occur once, got '{key}' twice")


def test_as_much_nesting_as_is_saved_is_read(tmp_path):
    file, model = tmp_path / "deep.ckpt", nn.Linear(1, 1)
    for kind, levels in ((list, 198), (tuple, 99), (dict, 66)):
        extra: Any = kind()
        for _ in range(levels - 1):
            extra = {"x": extra} if kind is dict else kind([extra])
        checkpoint.save(file, model, extra=extra)
        assert checkpoint.load(file, model) == extra
        with pytest.raises(CheckpointError, match=r"got more. A container may contain itself"):
            checkpoint.save(file, model, extra=[extra])


def test_a_header_with_another_order_of_bytes_is_refused(file, run):
    header, data = forging.header_of(file)
    offsets = {name: header[name]["data_offsets"] for name in ("5.bias", "6.bias")}
    header["5.bias"]["data_offsets"], header["6.bias"]["data_offsets"] = (
        offsets["6.bias"],
        offsets["5.bias"],
    )
    forging.write(file, header, data)
    expect_refused(file, run, "tensor '5.bias' is not as it was saved. The file is damaged")


class Small:
    """A file of a few hundred bytes, to be damaged often."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "small.ckpt"
        self.model = nn.Linear(2, 1)
        checkpoint.save(self.file, self.model, rng=False)
        self.content = self.file.read_bytes()
        self.there = self.model.state_dict()
        self.there = {name: value.clone() for name, value in self.there.items()}

    def load(self, content: bytes) -> bool:
        """Whether it is taken. Then it says what was saved, else nothing has been changed."""
        self.file.write_bytes(content)
        with torch.no_grad():
            for value in self.model.parameters():
                value.fill_(7.0)
        try:
            checkpoint.load(self.file, self.model, rng=False)
        except CheckpointError:
            assert all((value == 7.0).all() for value in self.model.parameters())
            return False
        assert same(dict(self.model.state_dict()), self.there)
        return True


def test_a_file_cut_anywhere_is_refused(tmp_path):
    small = Small(tmp_path)
    assert small.load(small.content)
    assert not any(small.load(small.content[:end]) for end in range(0, len(small.content), 7))
    assert not small.load(small.content + b"\0")


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def test_a_file_with_another_bit_is_refused(tmp_path):
    small = Small(tmp_path)
    assert not any(
        small.load(flipped(small.content, bit)) for bit in range(0, 8 * len(small.content), 37)
    )


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_file_with_any_other_bit_is_refused(tmp_path):
    small = Small(tmp_path)
    bits = range(8 * len(small.content))
    assert not any(small.load(flipped(small.content, bit)) for bit in bits)
    print(f"{len(bits)} bits")


# A value that takes the place of something in the index.
STRANGE: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**70, 0.5, 1e999, "", "x", "0.bias", [], {}, [[]], [["lr", 1]]),
    *({"dict": []}, {"tuple": []}, {"counter": [[1, 2]]}, {"tensor": "0.bias"}, {"float": "nan"}),
    *({"tensor": 3}, {"float": 3}, {"dict": [[1]]}, {"dict": 3}, {"x": 1}),
)


def expect_only_refusals(file: Path, run: Run, count: int) -> tuple[int, int]:
    """Loads files with a few strange values in their index; how many are refused, and taken."""
    header, data = forging.header_of(file)
    text = header["__metadata__"]["pykern"]
    choose = random.Random(5)
    refused = 0
    before = run.states()
    for _ in range(count):
        index = json.loads(text)
        # The numbers of random states are many, and all the same to whoever reads them.
        spots = [
            spot
            for spot in forging.places(index)
            if not (isinstance(spot[0], list) and len(spot[0]) > 99)
        ]
        for container, key in choose.sample(spots, choose.randint(1, 2)):
            container[key] = choose.choice(STRANGE)
        index["sha256"] = checksum(index)
        header["__metadata__"]["pykern"] = json.dumps(index)
        forging.write(file, header, data)
        try:
            checkpoint.load(file, **run.parts())
            before = run.states()
        except CheckpointError:
            refused += 1
            assert same(run.states(), before)
    return refused, count - refused


def test_forged_at_random_a_file_is_at_worst_refused(file, run):
    refused, taken = expect_only_refusals(file, run, 60)
    assert refused > 30
    assert taken > 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_forged_at_random_many_times_a_file_is_at_worst_refused(file, run):
    begin = time.perf_counter()
    refused, taken = expect_only_refusals(file, run, 30_000)
    print(f"{refused} refused, {taken} taken in {time.perf_counter() - begin:.0f} s")
    assert refused > 20_000
