"""State that stages share outside arguments and results is refused in the first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pykern
from pykern.torch_private import dispatch_modes
from pykern.trace import CutError
from tests.trace.passing import (
    DICT,
    MICROBATCHES,
    SPACE,
    WAYS,
    WIDTH,
    Block,
    Get,
    Put,
    assert_same,
    batch,
    chain,
    detached,
    nothing,
    number,
    pipeline,
    step,
)

# Tensors that a worker leaves in a thread-local are another matter: their thread goes.
TENSORS = [way for way in WAYS if way != "thread-local"]
SEEN = r"stage 1 reads a tensor \(passing\.py:\d+\) that stage 0 has made \(passing\.py:\d+\)"
OWN = r"stage 0 sets VARIABLE, which layers of stage 1 use without setting"


@pytest.mark.parametrize("way", TENSORS)
def test_a_tensor_for_another_stage(way: str) -> None:
    """Microbatches raced."""
    get, put = WAYS[way]
    assert_same(chain(get, detached(put)), 1)
    assert_same(chain(get, detached(put), reader=1), 2)
    message = OWN if way == "context variable" else SEEN
    with pytest.raises(CutError, match=message) as caught:
        step(chain(get, detached(put)), 2)
    assert "Return the value from the layer and take it as an argument" in str(caught.value)
    # With its graph.
    with pytest.raises(CutError, match=message):
        step(chain(get, put), 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_number_for_another_stage(way: str) -> None:
    get, put = WAYS[way]
    assert_same(chain(get, number(put)), 1)
    message = {
        "context variable": OWN,
        "thread-local": OWN.replace("VARIABLE", "LOCAL"),
    }.get(way, r"which layers of stages 0, 1 can read, changes from forward to forward")
    with pytest.raises(CutError, match=message):
        step(chain(get, number(put)), 2)


def test_a_number_of_stages_that_share_nothing_else() -> None:
    _, put = WAYS["attribute"]
    assert_same(chain(nothing, number(put)), 2)


@pytest.mark.parametrize("devices", [3, 4])
@pytest.mark.parametrize("recompute", [None, "stage", "layer"])
def test_more_stages_and_recompute(devices: int, recompute: Any) -> None:
    get, put = WAYS["attribute"]
    last = devices - 1
    with pytest.raises(CutError, match=rf"stage {last} reads a tensor .* that stage 0 has made"):
        step(chain(get, detached(put)), devices, recompute=recompute)


@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_within_a_stage_that_is_recomputed(recompute: Any) -> None:
    get, put = WAYS["attribute"]
    assert_same(chain(get, detached(put), reader=1), 2, recompute=recompute)


class Keeps(nn.Linear):
    """Keeps an alias of its result."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x).tanh()
        self.kept = result.detach()
        return result


class ReadsKept(nn.Linear):
    """Reads the alias that the layer before it keeps."""

    def __init__(self, width: int, before: Keeps) -> None:
        super().__init__(width, width)
        self.before = [before]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.before[0].kept


@pytest.mark.parametrize("recompute", [None, "layer", "stage"])
def test_an_alias_of_a_result_within_a_stage(recompute: Any) -> None:
    torch.manual_seed(0)
    keeps = Keeps(4, 4)
    model = nn.Sequential(keeps, ReadsKept(4, keeps), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    for part in x.chunk(4):
        (model(part).pow(2).mean() / 4).backward()
    expected: list[Any] = [parameter.grad for parameter in model.parameters()]
    with pykern.Pipeline(
        model,
        devices="cpu:1",
        schedule="gpipe",
        microbatches=4,
        loss_fn=lambda y: y.pow(2).mean(),
        recompute=recompute,
    ) as pipe:
        # The first step looks at what layers read, the second uses that.
        for _ in range(2):
            model.zero_grad()
            pipe.step(x)
            found: list[Any] = [parameter.grad for parameter in model.parameters()]
            assert all(map(torch.equal, found, expected))


def test_backwards_from_a_later_stage() -> None:
    """The first stage reads a tensor of the last stage with a later microbatch."""
    get, put = WAYS["attribute"]
    put(nn.Module(), torch.ones(()))
    with pytest.raises(CutError, match=r"stage 0 reads a tensor .* that stage 1 has made"):
        step(chain(get, detached(put), writer=3, reader=0), 2)


def _peer(set_: Put, get: Get) -> nn.Sequential:
    """The first block knows the last."""
    model = chain(get, lambda block, y: set_(vars(block)["peer"], y))
    vars(model[0])["peer"] = model[3]
    return model


@pytest.mark.parametrize(
    ("set_", "get"),
    [
        (lambda peer, y: setattr(peer, "scale", y.detach().mean()), lambda block: block.scale),
        (lambda peer, y: setattr(peer, "buffer", y.detach().mean()), lambda block: block.buffer),
        (lambda peer, y: peer.buffer.copy_(y.detach().mean()), lambda block: block.buffer),
    ],
    ids=["attribute", "buffer", "write"],
)
def test_attributes_of_a_layer_of_another_stage(set_: Put, get: Get) -> None:
    with pytest.raises(CutError, match=SEEN.replace("passing", "test_beside", 2)[-20:]):
        step(_peer(set_, get), 2)


def test_numbers_of_a_layer_of_another_stage() -> None:
    model = _peer(lambda peer, y: setattr(peer, "scale", y.mean().item()), lambda b: b.scale)
    with pytest.raises(CutError, match=r"Block\.peer\.scale, which layers of stages 0, 1 can read"):
        step(model, 2)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attribute": lambda output, target: F.mse_loss(output, target) * SPACE.value,
    "dict": lambda output, target: F.mse_loss(output, target) * DICT["value"],
}


@pytest.mark.parametrize("way", LOSSES)
@pytest.mark.parametrize("kind", [detached, number])
def test_what_the_loss_function_reads(way: str, kind: Callable[[Put], Put]) -> None:
    """A loss of 0.0147 where the plain model has 0.0114."""
    _, put = WAYS[way]
    assert_same(chain(nothing, kind(put)), 1, LOSSES[way])
    message = "that stage 0 has made" if kind is detached else r"stages 0, 1 can read, changes"
    with pytest.raises(CutError, match=message):
        step(chain(nothing, kind(put)), 2, LOSSES[way])
    # The loss function may read tensors of its own stage.
    assert_same(chain(nothing, detached(put), writer=3), 2, LOSSES[way])


def test_every_step_is_refused_until_it_is_mended() -> None:
    get, put = WAYS["dict"]
    model = chain(get, detached(put))
    x, y = batch()
    with pipeline(model, 2) as pipe:
        for _ in range(4):
            with pytest.raises(CutError, match="that stage 0 has made"):
                pipe.step(x, target=y)


def test_predictions_and_other_modes_are_looked_at_too() -> None:
    get, put = WAYS["attribute"]

    def in_training(block: nn.Module, y: Tensor) -> None:
        if block.training:
            detached(put)(block, y)

    x, y = batch()
    with pipeline(chain(get, detached(put)), 2) as pipe, pytest.raises(CutError, match=SEEN):
        pipe(x)
    put(nn.Module(), 1.0)
    with pipeline(chain(get, in_training).eval(), 2) as pipe:
        for _ in range(3):
            pipe(x)
        pipe.train()
        with pytest.raises(CutError, match=SEEN):
            pipe.step(x, target=y)


def test_a_stream_is_looked_at_too() -> None:
    get, put = WAYS["attribute"]
    x, _ = batch()
    with pipeline(chain(get, detached(put)), 2) as pipe, pytest.raises(CutError, match=SEEN):
        list(pipe.stream([x, x]))


def test_nothing_looks_after_the_first_steps() -> None:
    x, y = batch()
    with pipeline(chain(nothing, nothing), 2) as pipe:
        stages = pipe._executor.stages
        pipe.step(x, target=y)
        assert all(stage.look is not None for stage in stages)
        for _ in range(2):
            pipe.step(x, target=y)
            assert all(stage.look is None for stage in stages)
        pipe.eval()
        pipe(x)
        assert all(stage.look is not None for stage in stages)


class Config:
    """The configuration of all layers."""

    def __init__(self) -> None:
        self.scale, self.names, self.calls = 0.5, ["a", "b"], {"most": 3}


class Usual(nn.Module):
    """Shares a configuration and a cache with others, and counts by itself."""

    def __init__(self, config: Config, cache: dict[int, Tensor], seen: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.config, self.cache, self.seen = config, cache, seen
        self.calls, self.longest = 0, 0
        self.own: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.longest = max(self.longest, len(x))
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.arange(WIDTH).float().cos()
        y = torch.tanh(self.linear(x)) * self.cache[len(x)] * self.config.scale
        self.own["mean"] = y.mean().item()
        # For whoever looks at it afterwards; no layer does.
        self.seen[str(id(self))] = y.detach()
        return y


def test_configurations_caches_counters_and_records_are_no_crossings() -> None:
    shared = Config(), dict[int, Tensor](), dict[str, Any]()
    assert_same(nn.Sequential(*(Usual(*shared) for _ in range(4))), 2)
    assert_same(nn.Sequential(*(Usual(*shared) for _ in range(4))), 4)


def test_one_layer_in_several_stages() -> None:
    """Its buffers and parameters are there for all of them."""
    block = Block(lambda module: module.buffer)
    x, y = batch()
    model = nn.Sequential(block, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), block)
    with pipeline(model, 2) as pipe:
        for _ in range(MICROBATCHES):
            pipe.step(x, target=y)


class Again(Block):
    """Checkpoints itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def _whole(put: Put) -> Put:
    """Sets what is given, in the same memory."""
    return lambda module, y: put(module, y.detach())


@pytest.mark.parametrize("way", ["attribute", "global", "closure"])
@pytest.mark.parametrize("kind", [detached, _whole])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_reads_what_a_later_microbatch_has_left(
    way: str, kind: Callable[[Put], Put], reentrant: bool
) -> None:
    """Gradients were 5e-2 off: the backward found what the last forward had left."""
    get, put = WAYS[way]

    def model() -> nn.Sequential:
        blocks = [Block(put=kind(put)), Again(get), Block(), Block()]
        blocks[1].reentrant = reentrant  # type: ignore[assignment]
        return nn.Sequential(*blocks)

    message = (
        r"the backward of microbatch 0 in stage 0 reads a tensor that microbatch 3 has left there "
        r"by now \((passing|test_beside)\.py:\d+\). Give .* its inputs as arguments"
    )
    for options in ({}, {"schedule": "zb_h1"}):
        with pytest.raises(CutError, match=message if not options else "left there by now"):
            step(model(), 2, **{"schedule": "gpipe", **options})
    # With one microbatch at a time it finds its own.
    assert_same(model(), 1, schedule="one_f_one_b")


class Caching(nn.Linear):
    """Checkpoints itself, and keeps what its first forward has made."""

    kept: Tensor | None = None

    def _compute(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.ones_like(x) * 2
        return torch.tanh(super().forward(x)) * self.kept

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._compute, x, use_reentrant=False)


@pytest.mark.parametrize("recompute", [None, "layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_backwards_that_read_what_their_forwards_have_read_are_fine(
    recompute: Any, schedule: str
) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Caching(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    assert_same(model, 2, schedule=schedule, recompute=recompute)


class Counts(nn.Module):
    """Counts its calls, and notes the modes of operations that they run under."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rate = 0.0
        self.calls = 0
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.modes.append(len(dispatch_modes()))
        return torch.tanh(self.linear(x))

    def was_watched(self) -> bool:
        """Whether any call since the last question was watched."""
        modes, self.modes = self.modes, []
        return any(modes)


def watched_steps(change: Callable[[Counts, int], object]) -> list[bool]:
    """Which of eight steps were watched, with a change before each."""
    first, last = Counts(), Counts()
    found = []
    with pipeline(nn.Sequential(first, last), 2) as pipe:
        for number in range(8):
            change(last, number)
            x, y = batch()
            pipe.step(x, target=y)
            found.append(last.was_watched())
            assert first.was_watched() == (number < 2)
    return found


def test_numbers_that_layers_change_themselves_are_not_watched_again() -> None:
    """Each step of a layer that counts its calls took ten times as long."""
    assert watched_steps(lambda last, number: None) == [True] * 2 + [False] * 6


def test_settings_that_return_are_watched_once() -> None:
    """As where a loop trains and freezes a discriminator in turn."""
    assert watched_steps(lambda last, number: last.requires_grad_(number % 2 == 0)) == [
        *[True] * 2,
        *[False] * 6,
    ]


def test_numbers_that_the_caller_changes_are_watched_again() -> None:
    def change(last: Counts, number: int) -> None:
        if number == 4:
            last.rate = 0.5

    assert watched_steps(change) == [True, True, False, False, True, True, False, False]
