"""torchgpipe's interface: what its own tests ask of it, in tests of our own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern.interop import fairscale
from pykern.interop.torchgpipe import BalanceError, GPipe
from pykern.interop.torchgpipe.balance import balance_by_size, balance_by_time
from pykern.interop.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from tests.outside.cases import assert_gradients, batch, mean_square, plain

WIDTH = 6
CHECKPOINTS = ("always", "except_last", "never")


def chain(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(layers or [nn.Linear(WIDTH, WIDTH) for _ in range(4)]))


def gpipe(module: nn.Sequential, balance: Any = None, **options: Any) -> GPipe:
    balance = [1] * len(module) if balance is None else balance
    return GPipe(module, balance, **({"devices": ["cpu"] * len(balance)} | options))


@skippable(stash=["x"])
class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        yield stash("x", x)
        return self.linear(x)


@skippable(pop=["x"])
class Adds(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skipped = yield pop("x")
        return x if skipped is None else x + skipped


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_gradients_are_the_plain_models(checkpoint: Any) -> None:
    module = chain()
    reference = copy.deepcopy(module)
    x, x_reference = batch(7).requires_grad_(), batch(7).requires_grad_()
    with gpipe(module, [1, 3], chunks=3, checkpoint=checkpoint) as model:
        loss = mean_square(model(x))
        loss.backward()
        assert torch.equal(loss, plain(reference, x_reference, 3, mean_square))
        assert_gradients(model, reference)
        assert x.grad is not None
        assert x_reference.grad is not None
        assert torch.equal(x.grad, x_reference.grad)


@pytest.mark.parametrize(("checkpoint", "calls"), [("always", 6), ("except_last", 5), ("never", 3)])
def test_forwards_run_again_as_the_checkpoint_says(checkpoint: Any, calls: int) -> None:
    seen: list[None] = []

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(None)
            return super().forward(x)

    with gpipe(chain(Counts(WIDTH, WIDTH)), chunks=3, checkpoint=checkpoint) as model:
        model(batch(3)).sum().backward()
        seen.clear()
        # The first forward was watched.
        model(batch(3)).sum().backward()
        assert len(seen) == calls
        seen.clear()
        with torch.no_grad():
            model(batch(3))
        assert len(seen) == 3


def test_a_layer_in_two_partitions_trains_in_both() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    module = chain(shared, nn.Tanh(), shared)
    reference = copy.deepcopy(module)
    with gpipe(module, [1, 2], chunks=2) as model:
        mean_square(model(batch(4))).backward()
        mean_square(reference(batch(4))).backward()
        torch.testing.assert_close(shared.weight.grad, reference[0].weight.grad)


def test_it_is_a_module_of_the_layers() -> None:
    module = chain()
    with gpipe(module, [1, 3], chunks=2) as model:
        assert len(model) == 4
        assert model[3] is module[3]
        assert list(model) == list(module)
        assert model.balance == [1, 3]
        assert [device.type for device in model.devices] == ["cpu", "cpu"]
        assert (model.chunks, model.checkpoint) == (2, "except_last")
        assert list(model.state_dict())[:3] == [
            "partitions.0.0.weight",
            "partitions.0.0.bias",
            "partitions.1.1.weight",
        ]
        again = gpipe(chain(*copy.deepcopy(list(module))), [1, 3])
        again.load_state_dict(model.state_dict())
        again.close()
        assert list(map(id, model.parameters())) == list(map(id, module.parameters()))


def test_it_stays_on_its_devices() -> None:
    with gpipe(chain()) as model:
        for move in (model.cpu, model.cuda, lambda: model.to("cpu"), lambda: model.to(batch())):
            with pytest.raises(TypeError, match="must stay on its devices"):
                move()
        assert model.to(torch.float64)[0].weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"balance": [1, 2]}, BalanceError, r"the sum 4, got \[1, 2\]"),
        ({"balance": [5, -1]}, BalanceError, "positive ints"),
        ({"balance": [2.0, 2]}, BalanceError, r"positive ints with the sum 4, got \[2.0, 2\]"),
        ({"checkpoint": "some"}, ValueError, "must be one of 'always', .* got 'some'"),
        ({"chunks": 0}, ValueError, "chunks must be a positive integer, got 0"),
        ({"chunks": "2"}, ValueError, "chunks must be a positive integer, got '2'"),
        ({"devices": "cpu"}, ValueError, "must be a list, one for each partition, got 'cpu'"),
        ({"devices": ["cpu", "cuda:0", "cpu", "cpu"]}, ValueError, "CPU workers, not both"),
        ({"devices": ["cpu"]}, IndexError, "at least 4, one for each partition"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        gpipe(chain(), **options)


def test_what_it_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"balance must be .* got None.*balance_by_time"):
        GPipe(chain())
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential, got Linear"):
        GPipe(nn.Linear(2, 2), [1])  # type: ignore[arg-type]
    with pytest.raises(BalanceError, match=r"at least one layer, got an empty nn\.Sequential"):
        GPipe(nn.Sequential(), [])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_skip_connections(checkpoint: Any) -> None:
    """Nested ones, of one name, with partitions between."""
    outer = Namespace()
    first: Any = Keeps()
    last: Any = Adds()
    module = chain(first.isolate(outer), Keeps(), nn.Tanh(), Adds(), last.isolate(outer))
    reference = copy.deepcopy(module)
    with gpipe(module, chunks=3, checkpoint=checkpoint) as model:
        mean_square(model(batch(7))).backward()
        plain(reference, batch(7), 3, mean_square)
        assert_gradients(model, reference)


def test_a_skip_may_be_nothing() -> None:
    @skippable(stash=["x"])
    class KeepsNothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("x", None)
            return x

    with gpipe(chain(KeepsNothing(), nn.Tanh(), Adds()), chunks=2) as model:
        assert torch.equal(model(batch(4)), batch(4).tanh())


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ([Keeps], "nothing pops 'x'"),
        ([Adds], "but it was not stashed"),
        ([Keeps, Adds, Adds], "but it was popped before"),
        ([Keeps, Keeps, Adds], "as stashable once more"),
        ([Adds, Keeps], "not stashed"),
    ],
)
def test_skips_that_do_not_match(layers: list[Any], match: str) -> None:
    module = nn.Sequential(*(make() for make in layers))
    with pytest.raises(TypeError, match=match):
        verify_skippables(module)
    with pytest.raises(TypeError, match=match):
        gpipe(module)


def test_forwards_keep_to_what_they_have_declared() -> None:
    @skippable(stash=["x"])
    class Forgets(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x

    @skippable(stash=["x"])
    class Another(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("y", x)
            return x

    @skippable(stash=["x"])
    class Strange(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield x
            return x

    for make, error, match in (
        (Forgets, RuntimeError, "must be stashed or popped, got neither for 'x'"),
        (Another, RuntimeError, "names must be declared as stashable, got 'y'"),
        (Strange, TypeError, "must yield stash or pop"),
    ):
        with gpipe(chain(make(), Adds())) as model, pytest.raises(error, match=match):
            model(batch(2))


def test_a_second_pop_is_refused_as_such() -> None:
    """The user got a KeyError of a dict that the user has never seen."""

    @skippable(pop=["x"])
    class AddsTwice(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + (yield pop("x")) + (yield pop("x"))

    match = "'x' must be popped once by a forward, got a second pop"
    with gpipe(chain(Keeps(), AddsTwice())) as model, pytest.raises(RuntimeError, match=match):
        model(batch(2))


def test_deferred_batch_norm_is_that_of_the_full_batch() -> None:
    module = chain(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    whole = copy.deepcopy(module)
    with gpipe(module, chunks=4, deferred_batch_norm=True) as model:
        model(batch(8)).sum().backward()
        whole(batch(8))
        torch.testing.assert_close(module[0].running_mean, whole[0].running_mean)
        assert module[0].num_batches_tracked == 1


def test_balances() -> None:
    module = chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 600))
    assert sum(balance_by_time(3, module, batch(2))) == 7
    assert balance_by_size(2, module, batch(2)) == [6, 1]


def test_fairscales_name() -> None:
    with fairscale.Pipe(chain(), [2, 2], devices=["cpu", "cpu"], chunks=2) as model:
        assert model(batch(4)).requires_grad
