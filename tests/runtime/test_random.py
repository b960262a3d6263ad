"""Random numbers: reproducible, the caller's generator moved by one draw at most."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pykern
from pykern.runtime.random import action_seed


def model() -> list[nn.Module]:
    return [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)]


def run(layers: list[nn.Module], num_devices: int, seed: int) -> tuple[Tensor, Tensor]:
    """A step's loss, and the next number from the caller's generator."""
    with pykern.Pipeline(
        layers, devices=f"cpu:{num_devices}", microbatches=4, loss_fn=F.mse_loss, balance="layers"
    ) as pipe:
        batch = torch.ones(8, 6), torch.zeros(8, 6)
        torch.manual_seed(seed)
        return pipe.step(batch[0], target=batch[1]), torch.rand(())


def test_the_seed_decides() -> None:
    layers = model()
    first, again, other = (run(layers, 4, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_a_model_without_draws_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(())
    assert torch.equal(run([nn.Linear(6, 6), nn.Linear(6, 6)], 2, 5)[1], expected)


def test_a_model_with_draws_takes_one_number_per_step() -> None:
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.rand(())
    for num_devices in (1, 2, 4):
        assert torch.equal(run(model(), num_devices, 5)[1], expected)


def test_steps_and_microbatches_draw_different_numbers() -> None:
    masks: list[Tensor] = []

    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            masks.append(F.dropout(torch.ones(64), 0.5))
            return x

    with pykern.Pipeline([Keep(), Keep()], devices="cpu:2", microbatches=4) as pipe:
        for _ in range(2):
            pipe(torch.ones(4, 6))
    assert len({tuple(mask.tolist()) for mask in masks}) == 16


def test_draws_begin_and_end_with_train_mode() -> None:
    layers = [nn.Linear(6, 6), nn.Dropout(0.5)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2) as pipe:
        x = torch.ones(4, 6)
        for _ in range(2):
            pipe.eval()
            assert torch.equal(pipe(x), layers[0](x))
            pipe.train()
            torch.manual_seed(3)
            first = pipe(x)
            torch.manual_seed(3)
            assert torch.equal(pipe(x), first)
            assert not torch.equal(first, layers[0](x))


def test_recomputing_dropout_is_refused_not_wrong() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return y

    layers = [nn.Linear(6, 6), Checkpointed()]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        batch = torch.ones(4, 6), torch.zeros(4, 6)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="draws random numbers in a backward"):
                pipe.step(batch[0], target=batch[1])
        pipe.eval()
        pipe.step(batch[0], target=batch[1])


def test_seeds_do_not_collide() -> None:
    seeds = {
        action_seed(step, stage, microbatch)
        for step in (0, 1, -1, 2**63 - 1)
        for stage in range(64)
        for microbatch in range(64)
    }
    assert len(seeds) == 4 * 64 * 64
