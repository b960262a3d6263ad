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
    "unknown key": (lambda i: i.update(hooks=[]), "no such key as 'hooks'"),
    "missing key": (lambda i: i.pop("rng"), "has no key 'rng'"),
    "no tensors": (lambda i: i.update(tensors=3), "other tensors than the file holds"),
    "a tensor less": (lambda i: i["tensors"].pop("0.bias"), "other tensors than the file holds"),
    "dtype": (lambda i: i["tensors"]["0.bias"].update(dtype="int8"), "'0.bias' is not what was"),
    "digest": (lambda i: i["tensors"]["0.bias"].update(sha256="0"), "'0.bias' is not what was"),
    "names": (lambda i: i["model"].update(x="0.bias"), "the model: 'x' is only in the file"),
    "another's tensor": (
        lambda i: i["model"].update({"0.bias": "0.weight"}),
        r"0.bias is float32 \[6\] here and float32 \[6, 6\] in the file",
    ),
    "no such tensor": (lambda i: i["model"].update({"0.bias": "x"}), "the file has no tensor 'x'"),
    "no table": (lambda i: i.update(model=[1]), r"model is no table of names: \[1\]"),
    "no keys": (lambda i: i["model"].update({"0.bias": []}), "model is no table of names"),
    "no model": (lambda i: i.update(model=None), "model is no table of names: None"),
    "a gradient of nothing": (
        lambda i: i["grads"].update({"x": "0.bias"}),
        "a gradient of 'x', which is no parameter here",
    ),
    "a gradient of a shape": (
        lambda i: i["grads"].update({"0.bias": "0.weight"}),
        r"the gradient of 0.bias is float32 \[6\] here and",
    ),
    "a learning rate": (lambda i: put(settings(i), "lr", "fast"), "lr is a number here and a str"),
    "an infinite number": (lambda i: put(settings(i), "lr", 1e999), "no value of a checkpoint"),
    "a pair": (lambda i: settings(i).append(["lr"]), r"no key and value: \['lr'\]"),
    "a key twice": (lambda i: settings(i).append(["lr", 1]), "a key occurs twice"),
    "a tag": (lambda i: put(settings(i), "lr", {"object": "os"}), "no value of a checkpoint"),
    "two tags": (lambda i: put(settings(i), "lr", {"tuple": [], "dict": []}), "no value of a"),
    "parameters": (lambda i: put(settings(i), "params", [3]), "has no names in the file"),
    "state of nothing": (
        lambda i: put(dict(i["optimizer"]["dict"])["state"]["dict"], "x", {"dict": []}),
        "state of 'x', which the optimizer does not train",
    ),
    "state of a shape": (
        lambda i: put(
            dict(i["optimizer"]["dict"])["state"]["dict"][1][1]["dict"],
            "exp_avg",
            {"tensor": "0.weight"},
        ),
        r"the optimizer's exp_avg of 0.bias is float32 \[6, 6\]; it is float32 \[6\]",
    ),
    "no state": (lambda i: i.update(optimizer={"dict": []}), "AdamW here, None in the file"),
    "a list of states": (lambda i: i.update(optimizer=[1]), "AdamW here, None in the file"),
    "an attribute": (
        lambda i: put(settings(i, "scheduler"), "optimizer", 1),
        "the scheduler: 'optimizer' is only in the file",
    ),
    "an attribute's kind": (
        lambda i: put(settings(i, "scheduler"), "last_epoch", "x"),
        "last_epoch is a number here and a string in the file",
    ),
    "a counter": (
        lambda i: put(settings(i, "scheduler"), "milestones", {"counter": [[2, 1], ["x", 1]]}),
        r"a Counter counts ints; it has \('x', 1\)",
    ),
    "a scale": (lambda i: put(settings(i, "scaler"), "scale", None), "scale is a number here"),
    "a large scale": (lambda i: put(settings(i, "scaler"), "scale", 1e300), "scale is 1e[+]300"),
    "a large count": (
        lambda i: put(settings(i, "scaler"), "_growth_tracker", 2**70),
        "the scaler: _growth_tracker is 1180591620717411303424",
    ),
    "random numbers": (lambda i: i.update(rng=[1]), r"no random state: \[1\]"),
    "a generator less": (lambda i: settings(i, "rng").pop(), "the random state: .* is only here"),
    "torch's state": (lambda i: put(settings(i, "rng"), "torch", "AAAA"), "no state of the torch"),
    "no text": (lambda i: put(settings(i, "rng"), "torch", 3), "no state of the torch generator"),
    "no base64": (lambda i: put(settings(i, "rng"), "torch", "\xe9"), "no state of the torch"),
    "Python's state": (lambda i: put(settings(i, "rng"), "python", {"dict": []}), "the python gen"),
    "cuda's states": (lambda i: put(settings(i, "rng"), "cuda", 3), "no state of the cuda"),
    "numpy's position": (
        lambda i: put(dict(settings(i, "rng"))["numpy"]["dict"], "position", 10**6),
        "no state of the numpy generator: 624 words and position 1000000",
    ),
    "nesting": (lambda i: i.update(extra=nested(900)), "nested too deeply"),
    # Above what is read, below what Python would take.
    "less nesting": (lambda i: i.update(extra=nested(250)), "nested too deeply"),
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
        (lambda text: text.replace('"version":1', '"version":1,"version":1'), "occurs twice"),
        (lambda text: text.replace("2.5", "NaN"), "NaN is not a number of JSON"),
        (lambda text: text.replace("2.5", "3.5"), "sha256 must be"),
        (lambda text: text.replace("2.5", "9" * 5000), "the index is not as it was saved"),
        (lambda text: text[:-1], "the index is not as it was saved"),
        (lambda _: "[]", r"the index is \[\]"),
        (lambda _: "[" * 100_000, "nested too deeply"),
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
    with pytest.raises(CheckpointError, match="is not a regular file"):
        checkpoint.load(tmp_path, run.model)
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none", run.model)


@pytest.mark.parametrize("key", ["__metadata__", "5.bias"])
def test_a_header_that_repeats_a_key_is_refused(file, run, key):
    header, data = forging.header_of(file)
    text = json.dumps(header)[:-1] + f", {json.dumps(key)}: {json.dumps(header[key])}}}"
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)
    expect_refused(file, run, f"damaged one: key '{key}' occurs twice")


def test_as_much_nesting_as_is_saved_is_read(tmp_path):
    file, model = tmp_path / "deep.ckpt", nn.Linear(1, 1)
    for kind, levels in ((list, 198), (tuple, 99), (dict, 66)):
        extra: Any = kind()
        for _ in range(levels - 1):
            extra = {"x": extra} if kind is dict else kind([extra])
        checkpoint.save(file, model, extra=extra)
        assert checkpoint.load(file, model) == extra
        with pytest.raises(CheckpointError, match="extra is nested too deeply"):
            checkpoint.save(file, model, extra=[extra])


def test_a_header_with_another_order_of_bytes_is_refused(file, run):
    header, data = forging.header_of(file)
    offsets = {name: header[name]["data_offsets"] for name in ("5.bias", "6.bias")}
    header["5.bias"]["data_offsets"], header["6.bias"]["data_offsets"] = (
        offsets["6.bias"],
        offsets["5.bias"],
    )
    forging.write(file, header, data)
    expect_refused(file, run, "'5.bias' is not what was saved; the file is damaged")


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


# What takes the place of something in the index.
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
