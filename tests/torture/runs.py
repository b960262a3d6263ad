"""Random plans run on a small model: every bit is the plain model's, microbatch by microbatch."""

import copy
import random
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.runtime.random.seed import action_seed
from tests.support.plain_step import rows_of

from .campaign import Campaign
from .raw import Form, Raw, random_plan
from .rules import broken

# Plans that stages run: without slices, copies to the host, and updates.
_FORM = Form(max_devices=3, max_stages=4, slices=0.0, offload=0.0, updates=0.0)
_WIDTH = 3


class InPlace(nn.Module):
    """Writes into its input."""

    inplace = True

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def _linear(*, trains: bool = True) -> nn.Module:
    return nn.Linear(_WIDTH, _WIDTH).requires_grad_(trains)


LAYERS = {
    "linear": _linear,
    "frozen": lambda: _linear(trains=False),
    "tanh": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.4),
    "in place": InPlace,
    "norm": lambda: nn.LayerNorm(_WIDTH),
}


def cases(seed: int, number: int) -> Iterator[str]:
    """One plan on one model: some steps, perhaps a prediction."""
    rng = random.Random(f"{seed} {number}")
    _seed(rng.randrange(1 << 30))
    raw = _runnable(rng)
    layers = _model(rng, raw.num_stages)
    plain = copy.deepcopy(layers)
    yield "plans"
    with pykern.Pipeline(
        layers,
        devices=f"cpu:{raw.num_devices}",
        schedule=raw.plan(),
        loss_fn=F.mse_loss,
        balance="layers",
    ) as pipe:
        stages = pipe.partition.stages
        if rng.random() < 0.1 or not _trains(raw):
            yield from _predict(rng, pipe, plain, stages)
        for _ in range(rng.choice((1, 1, 2)) if _trains(raw) else 0):
            yield from _step(rng, raw, pipe, plain)
    kinds = {action[0] for row in raw.rows for action in row}
    yield from (f"plans with {kind}" for kind in sorted(kinds - {"F"}))
    if len(raw.replicas) > 1:
        yield "plans with replicas"
    if any(raw.overlaps):
        yield "plans with pairs"


def _seed(number: int) -> None:
    """As torch.manual_seed, which for GPUs that are not there keeps a stack trace of each call."""
    torch.default_generator.manual_seed(number)


def _trains(raw: Raw) -> bool:
    return any(action[0] in ("B", "I") for row in raw.rows for action in row)


def _runnable(rng: random.Random) -> Raw:
    while True:
        raw = random_plan(rng, _FORM)
        # Two that start together may have closed a circle.
        if not any(raw.overlaps) or not broken(raw):
            return raw


def _model(rng: random.Random, num_stages: int) -> nn.Sequential:
    """At least a layer for each stage; the first trains, so that each loss depends on it."""
    names = ["linear"]
    while len(names) < num_stages + rng.randrange(4):
        name = rng.choice(list(LAYERS))
        # The backward of tanh needs the output of tanh.
        if (names[-1], name) != ("tanh", "in place"):
            names.append(name)
    return nn.Sequential(*(LAYERS[name]() for name in names))


def _step(
    rng: random.Random, raw: Raw, pipe: pykern.Pipeline, plain: nn.Sequential
) -> Iterator[str]:
    rows = rng.randint(1, 2 * raw.num_microbatches + 1)
    x, y = torch.randn(rows, _WIDTH), torch.randn(rows, _WIDTH)
    before = torch.get_rng_state()
    loss = pipe.step(x.clone(), target=y)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    assert torch.equal(loss, plain_step(raw, plain, pipe.partition.stages, x, y)), "the loss"
    assert torch.equal(after, torch.get_rng_state()), "random numbers"
    for (name, one), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        same = one.grad is other.grad if other.grad is None else _equal(one.grad, other.grad)
        assert same, f"the gradient of {name}"
    yield "steps"


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)


def _predict(
    rng: random.Random, pipe: pykern.Pipeline, plain: nn.Sequential, stages: Sequence[range]
) -> Iterator[str]:
    x = torch.randn(rng.randint(1, 5), _WIDTH)
    pipe.eval()
    plain.eval()
    parts = x.split(rows_of(len(x), pipe.plan.num_microbatches))
    with torch.no_grad():
        expected = torch.cat([plain(part.clone()) for part in parts])
    assert torch.equal(pipe(x.clone()), expected), "the output"
    pipe.train()
    plain.train()
    yield "predictions"


def plain_step(
    raw: Raw, model: nn.Sequential, stages: Sequence[range], x: Tensor, y: Tensor
) -> Tensor:
    """Loss of the batch; gradients are added to `.grad` in the order of the plan's B and W.

    The model runs as a whole, microbatch by microbatch. Only the order in which what they leave is
    added up is the plan's: each stage has its own.
    """
    rows = rows_of(len(x), raw.num_microbatches)
    draws = any(isinstance(layer, nn.Dropout) for layer in model)
    step_seed = int(torch.empty((), dtype=torch.int64).random_()) if draws else 0
    state = torch.get_rng_state()
    losses: list[Tensor] = []
    gradients: list[dict[int, Tensor | None]] = []
    for index, (part, target) in enumerate(zip(x.split(rows), y.split(rows), strict=True)):
        value = part.clone()
        for number, stage in enumerate(stages):
            _seed(action_seed(step_seed, number, index))
            for layer in stage:
                value = model[layer](value)
        weighted = F.mse_loss(value, target) * (rows[index] / len(x))
        trained = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(weighted, trained, allow_unused=True)
        losses.append(weighted.detach())
        gradients.append({id(p): g for p, g in zip(trained, found, strict=True)})
    torch.set_rng_state(state)
    for number, layers in enumerate(stages):
        parameters = [p for layer in layers for p in model[layer].parameters()]
        _add_up(raw, number, parameters, gradients)
    return sum(losses[1:], losses[0])


def _add_up(
    raw: Raw, stage: int, parameters: list[nn.Parameter], gradients: list[dict[int, Tensor | None]]
) -> None:
    orders: list[list[int]] = [[] for _ in raw.replicas]
    for row in raw.rows:
        for kind, of, microbatch, _ in row:
            if kind in ("B", "W") and of == stage and microbatch < len(gradients):
                orders[microbatch % len(orders)].append(microbatch)
    for parameter in parameters:
        for replica, order in enumerate(orders):
            terms = [gradients[m].get(id(parameter)) for m in order]
            _add(parameter, [t for t in terms if t is not None], whole=replica > 0)


def _add(parameter: nn.Parameter, terms: list[Tensor], *, whole: bool) -> None:
    """One by one; or, of another replica than the first, as a sum of its own."""
    if whole and terms:
        terms = [sum(terms[1:], terms[0])]
    for term in terms:
        parameter.grad = term if parameter.grad is None else parameter.grad + term


CAMPAIGN = Campaign(
    promise=(
        "A random plan that can run is bitwise equal to the plain model run microbatch by "
        "microbatch: loss, gradients, outputs and the caller's random numbers."
    ),
    case=cases,
)
