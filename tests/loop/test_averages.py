"""Averages of parameters, copies and exports of the model that a pipeline was made of."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.loop.loops import assert_same, batch, mlp, pipeline, plain_loop_step, twins


def averages(model: nn.Module) -> list[AveragedModel]:
    return [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]


def test_averages_are_of_the_model_that_trains() -> None:
    model, plain = twins(mlp())
    x, y = batch()
    with pipeline(model) as pipe:
        kept = [(one, averages(one)) for one in (model, plain)]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (pipe, plain)]
        for _ in range(3):
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for trained, of_it in kept:
                for average in of_it:
                    average.update_parameters(trained)
    for mine, other in zip(kept[0][1], kept[1][1], strict=True):
        assert_same(mine, other)
        assert not torch.equal(mine(x), model(x))


def test_copies_and_exports_of_the_model() -> None:
    model, _ = twins(mlp())
    x, y = batch()
    with pipeline(model) as pipe:
        pipe.step(x, target=y)
        copied = copy.deepcopy(model)
        program = torch.export.export(model.eval(), (x,))
        assert torch.equal(program.module()(x), model(x))
    torch.testing.assert_close(copied.state_dict(), model.state_dict(), rtol=0, atol=0)
    before = [parameter.grad for parameter in model.parameters()]
    with pipeline(copied) as other:
        other.step(x, target=y)
    # The copy has gradients of its own.
    for one, two, kept in zip(copied.parameters(), model.parameters(), before, strict=True):
        assert two.grad is kept
        assert one.grad is not two.grad
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
