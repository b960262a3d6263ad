"""Layers that cannot be sharded are refused before anything starts, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel

import pykern
from pykern.models.gpt import gpt
from pykern.parallel.tensor.shards import find_shards
from pykern.trace import CutError
from tests import peers
from tests.parallel.sharded import STYLES, Block, layers, mesh_of, pipeline


def found(model: nn.Module, styles: Any, cut: int = 4) -> list[tuple[str, int]]:
    """Names and stages of what is sharded in two stages of the model's children."""
    children = list(model.children())
    shards = find_shards(model, [children[:cut], children[cut:]], styles, 2)
    return [(one.name, one.stage) for one in shards]


def test_patterns_are_as_torch_has_them() -> None:
    model = nn.Sequential(*layers())
    both = [(f"{n}.{part}", int(n >= 4)) for part in ("up", "down") for n in range(1, 7)]
    assert found(model, STYLES) == both
    assert found(model, {"[23].u*": ColwiseParallel()}) == [("2.up", 0), ("3.up", 0)]
    whole = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
    assert found(model, {"?": whole})[0] == ("0", 0)


def tied() -> nn.Sequential:
    blocks = [Block(8) for _ in range(4)]
    blocks[2].up.weight = blocks[1].up.weight
    return nn.Sequential(*blocks)


def shared() -> nn.Sequential:
    block = Block(8)
    return nn.Sequential(*(nn.Sequential(part) for part in (block, Block(8), block, Block(8))))


def nested() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(Block(8)), nn.Sequential(Block(8)))


def small_gpt() -> nn.Sequential:
    return gpt(vocab=16, layers=2, width=8, heads=2, context=8)


@pytest.mark.parametrize(
    ("model", "styles", "error", "message"),
    [
        (
            layers,
            {"*.upp": ColwiseParallel()},
            ValueError,
            r"tensor_parallel must have styles for modules of the model, got '\*.upp'",
        ),
        (layers, {}, TypeError, "styles a dict from names"),
        (layers, [("*", ColwiseParallel())], TypeError, "styles a dict from names"),
        (
            layers,
            {"1.up": "colwise"},
            TypeError,
            "tensor_parallel must have a ParallelStyle for each name, got 'colwise' for '1.up'",
        ),
        (
            layers,
            {"": ColwiseParallel()},
            ValueError,
            "tensor_parallel must have styles for modules in the model, got one for the "
            "model itself, which is cut",
        ),
        (
            layers,
            {"1.norm": RowwiseParallel()},
            TypeError,
            "1.norm must be an nn.Linear or nn.Embedding for RowwiseParallel",
        ),
        (
            tied,
            STYLES,
            ValueError,
            "1.up.weight must be used once to be sharded, got 2 uses, which sharding would untie",
        ),
        (
            shared,
            {"*.0.up": ColwiseParallel()},
            ValueError,
            r"0\.0\.up must be used in one stage .* got stages 0, 1",
        ),
        (
            small_gpt,
            {"1.qkv": ColwiseParallel()},
            TypeError,
            "must call torch's operations to be sharded, got a .* of pykern.models, whose "
            "fused operations take whole tensors",
        ),
    ],
)
def test_what_is_refused(
    model: Callable[[], Any], styles: Any, error: type[Exception], message: str
) -> None:
    made = model()
    made = nn.Sequential(*made) if isinstance(made, list) else made
    with pytest.raises(error, match=message):
        found(made, styles, len(made) // 2)


def test_a_style_on_what_is_cut_is_refused() -> None:
    model = nested()
    inner = [part for outer in model.children() for part in outer.children()]
    with pytest.raises(
        CutError,
        match="tensor_parallel must have styles for modules within one stage, got one for 0, "
        "within which the model is cut",
    ):
        find_shards(model, [[inner[0]], [inner[1]]], {"*": ColwiseParallel()}, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"tensor_parallel": STYLES},
            TypeError,
            r"tensor_parallel must be \(mesh\['tp'\], styles\), got",
        ),
        (
            {"tensor_parallel": ("tp", STYLES)},
            TypeError,
            r"tensor_parallel must be a process group or a mesh of one dimension, as "
            r"mesh\['dp'\] is, got a",
        ),
        ({"capture": "auto"}, ValueError, "capture must be False with tensor_parallel, got 'auto'"),
        (
            {"schedule": "chimera"},
            ValueError,
            "the plan must have one replica for tensor_parallel, got 2",
        ),
        ({"recompute": pykern.Budget(10**9, sample=torch.ones(2, 4))}, ValueError, "Budget"),
    ],
)
def test_options_that_cannot_stand_beside_it(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"tensor_parallel": ("tp", STYLES), **options}
    with pytest.raises(error, match=message):
        pykern.Pipeline(
            nn.Sequential(*layers()),
            devices="cpu:2",
            microbatches=4,
            loss_fn=nn.functional.mse_loss,
            **given,
        )


def in_processes(_: int) -> list[str]:
    """Refusals where there is a group: the messages."""
    plane = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    messages = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises((TypeError, ValueError)) as info:
            call()
        messages.append(str(info.value))

    refused(lambda: pipeline(plane))
    mesh = mesh_of(2)
    with pipeline(mesh) as pipe:
        sharded = list(pipe.children())
        refused(lambda: pipe.step(torch.ones(4, 4), scaler=torch.amp.GradScaler("cpu")))
    refused(lambda: pipeline(mesh, sharded))
    refused(lambda: pykern.Pipeline(nn.Sequential(*sharded), devices="cpu:2", microbatches=2))
    return messages


@pytest.mark.slow
def test_what_is_refused_in_processes() -> None:
    for messages in peers.run(2, in_processes):
        of_mesh, of_scaler, again, plain = messages
        assert "a mesh of 2: ('dp', 'tp')" in of_mesh
        assert "scaler must be None with tensor_parallel" in of_scaler
        assert "1.up.weight must be a plain tensor, got a DTensor" in again
        assert "1.up.weight must be a plain tensor, got a DTensor" in plain


class Passing(nn.Module):
    """A block that returns a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.up(x)


def hand_over(_: int) -> list[str]:
    styles = {"*.up": ColwiseParallel(use_local_output=False)}
    mesh = mesh_of(2)
    model = [Passing(), nn.Linear(8, 8)]
    with pipeline(mesh, model, tensor_parallel=(mesh, styles)) as pipe:
        try:
            pipe(torch.ones(4, 8))
        except Exception as error:
            return [type(error).__name__, str(error)]
    return []


@pytest.mark.slow
def test_dtensors_do_not_cross_stages() -> None:
    for kind, message in peers.run(2, hand_over):
        assert kind == "TypeError"
        assert (
            "stage 0 must hand over plain tensors, got a DTensor, which is of its own "
            "device's group"
        ) in message
