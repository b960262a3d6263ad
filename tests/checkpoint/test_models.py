"""Any model's tensors come back under their names, or are refused before anything is written."""

from typing import cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from pykern import checkpoint
from pykern.checkpoint import CheckpointError
from pykern.checkpoint.file import DTYPES, digest
from tests.checkpoint.runs import same


class Tied(nn.Module):
    """Two names for one parameter, and a buffer that is a view of another."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("whole", torch.arange(6.0))
        self.register_buffer("part", self.whole[2:4])

    whole: torch.Tensor


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.ckpt"


def test_a_file_of_a_model_alone_is_its_state_dict_to_other_programs(file):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    checkpoint.save(file, model)
    assert same(load_file(file), dict(sorted(model.state_dict().items())))
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"


def test_beside_other_parts_the_models_tensors_keep_their_names(file):
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(file, model, optimizer, grads=True)
    assert sorted(load_file(file)) == [
        *("0.bias", "0.weight", "grads/0.bias", "grads/0.weight"),
        *(f"optimizer/state/0.{name}/momentum_buffer" for name in ("bias", "weight")),
    ]


@pytest.mark.skipif(not hasattr(torch.ones(1), "grad_dtype"), reason="this torch has no grad_dtype")
def test_gradients_of_another_type_than_their_parameters_come_back(file):
    model, other = nn.Linear(3, 4).bfloat16(), nn.Linear(3, 4).bfloat16()
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.grad_dtype = torch.float32
    model(torch.ones(2, 3).bfloat16()).sum().backward()
    checkpoint.save(file, model, grads=True)
    checkpoint.load(file, other)
    for one, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert loaded.grad is not None
        assert one.grad is not None
        assert loaded.grad.dtype == torch.float32
        assert torch.equal(loaded.grad, one.grad)


def test_a_tensor_with_the_name_of_a_files_metadata_comes_back(file):
    model = nn.Module()
    model.register_buffer("__metadata__", torch.ones(2))
    checkpoint.save(file, model)
    model.get_buffer("__metadata__").zero_()
    checkpoint.load(file, model)
    assert model.get_buffer("__metadata__").tolist() == [1, 1]


def test_tied_tensors_are_saved_once_and_stay_tied(file):
    checkpoint.save(file, model := Tied())
    assert sorted(load_file(file)) == ["embedding.weight", "part", "whole"]
    checkpoint.load(file, other := Tied())
    assert same(other.state_dict(), model.state_dict())
    assert other.head.weight is other.embedding.weight
    checkpoint.load(file, apart := Tied(tied=False))
    assert same(apart.state_dict(), model.state_dict())


def test_tensors_that_differ_do_not_become_one(file):
    checkpoint.save(file, Tied(tied=False))
    with pytest.raises(
        CheckpointError, match=r"embedding.weight and head.weight must be equal in the file"
    ):
        checkpoint.load(file, Tied())


def test_equal_tensors_may_become_one(file):
    apart = Tied(tied=False)
    apart.head.weight.data.copy_(apart.embedding.weight)
    checkpoint.save(file, apart)
    checkpoint.load(file, tied := Tied())
    assert same(tied.state_dict(), apart.state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_a_file_comes_back(file, dtype):
    model, other = nn.Module(), nn.Module()
    values = torch.randn(7, 5).mul(3).to(dtype)
    # Some columns of a larger tensor, and nothing.
    model.register_buffer("columns", values[:, 1:3])
    model.register_buffer("scalar", values[0, 0])
    model.register_buffer("none", values[:0])
    other.register_buffer("columns", torch.zeros(2, 7).to(dtype).t())
    other.register_buffer("scalar", torch.zeros(()).to(dtype))
    other.register_buffer("none", torch.zeros(0, 5).to(dtype))
    checkpoint.save(file, model)
    checkpoint.load(file, other)
    for ours, theirs in zip(other.buffers(), model.buffers(), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert digest(ours) == digest(theirs)
    assert not other.get_buffer("columns").is_contiguous()


def test_values_come_back_to_the_bit_whatever_they_are(file):
    model, other = nn.Module(), nn.Module()
    bits = torch.randint(-(2**31), 2**31, (1000,), dtype=torch.int32)
    bits[:3] = torch.tensor([0x7FC00001, -0x400000, -(2**31)])
    model.register_buffer("x", bits.view(torch.float32))
    other.register_buffer("x", torch.zeros(1000))
    checkpoint.save(file, model)
    checkpoint.load(file, other)
    assert torch.equal(other.get_buffer("x").view(torch.int32), bits)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_layers_have_the_names_they_had_before(file):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled = nn.Sequential(nn.Linear(2, 2), cast("nn.Module", torch.compile(nn.Linear(2, 2))))
    assert "1._orig_mod.weight" in compiled.state_dict()
    optimizer = torch.optim.Adam(compiled.parameters())
    for parameter in compiled.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoint.save(file, compiled, optimizer, grads=True)
    checkpoint.load(file, model, fresh := torch.optim.Adam(model.parameters()))
    assert same([*model.parameters()], [*compiled.parameters()])
    assert same(fresh.state_dict(), optimizer.state_dict())
    checkpoint.save(file, model)
    checkpoint.load(file, compiled)


def test_gradients_of_an_accumulation_come_back(file):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    other.bias.grad = torch.ones(2)
    checkpoint.save(file, model, grads=True)
    checkpoint.load(file, other)
    assert same(other.weight.grad, model.weight.grad)
    assert other.bias.grad is None


def test_gradients_are_left_alone_where_none_were_saved(file):
    model = nn.Linear(2, 2)
    model.weight.grad = grad = torch.ones(2, 2)
    checkpoint.save(file, model)
    checkpoint.load(file, model)
    assert model.weight.grad is grad


def test_extra_is_what_it_was(file):
    extra = {
        "numbers": (1, -(2**80), 0.1, float("inf"), -0.0, True, None),
        3: ["text \N{SNOWMAN}", [], {}, ()],
        "a/b": torch.ones(2),
        "a": {"b": torch.zeros(2)},
    }
    checkpoint.save(file, model := nn.Linear(1, 1), extra=extra)
    assert same(checkpoint.load(file, model), extra)


class Holder(nn.Module):
    """A buffer, whatever it is."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("x", value)


class Counted(nn.Linear):
    """State that is not a tensor."""

    def get_extra_state(self) -> int:
        return 3


REFUSED = {
    "sparse": (
        Holder(torch.eye(2).to_sparse()),
        "x must be a dense .* got one that is torch.sparse_coo",
    ),
    "meta": (
        Holder(torch.empty(2, device="meta")),
        "x must be a dense .* got one that is on the meta device",
    ),
    "dtype": (
        Holder(torch.zeros(2, dtype=torch.complex128)),
        r"x must have a dtype that safetensors supports, "
        r"got complex128 \[2\]. Save it as another dtype",
    ),
    "lazy": (nn.LazyLinear(2), "weight must be a plain tensor, got a UninitializedParameter"),
    "extra state": (Counted(1, 1), "_extra_state must be a plain tensor, got a int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_cannot_hold_is_refused_before_it_is_written(file, name):
    model, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(file, model)
    assert list(file.parent.iterdir()) == []
