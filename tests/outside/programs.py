"""Training programs whose losses no pipeline knows, for modules that may be pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
ROWS = 8
# Makes of a module what is called in its place.
Wrap = Callable[[nn.Module], nn.Module]


def net(seed: int, ends: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, ends),
    ).double()


def batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def adam(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(chain(*(module.parameters() for module in modules)), lr=0.01)


def gan(wrap: Wrap) -> list[nn.Module]:
    """Two networks that train against each other; one loss has two calls of one of them."""
    generator, critic = net(1), net(2, ends=1)
    make, judge = wrap(generator), wrap(critic)
    of_generator, of_critic = adam(generator), adam(critic)
    for real in batches(3):
        made = make(real.flip(0))
        of_critic.zero_grad()
        (F.softplus(-judge(real)) + F.softplus(judge(made.detach()))).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        critic.requires_grad_(False)
        F.softplus(-judge(made)).mean().backward()
        critic.requires_grad_(True)
        of_generator.step()
    return [generator, critic]


def train(modules: list[nn.Module], loss_of: Callable[[Tensor], Tensor]) -> list[nn.Module]:
    """Some updates of the modules."""
    optimizer = adam(*modules)
    for x in batches(3):
        optimizer.zero_grad()
        loss_of(x).backward()
        optimizer.step()
    return modules


def distillation(wrap: Wrap) -> list[nn.Module]:
    """A teacher that does not train, and a loss of both outputs."""
    teacher, student = net(1), net(2)
    taught, learns = wrap(teacher.eval().requires_grad_(False)), wrap(student)

    def loss_of(x: Tensor) -> Tensor:
        wanted = taught(x).softmax(1)
        return F.kl_div(learns(x).log_softmax(1), wanted, reduction="batchmean")

    return train([student], loss_of)


def siamese(wrap: Wrap) -> list[nn.Module]:
    """One network twice in a loss."""
    module = net(1)
    twin = wrap(module)

    def loss_of(x: Tensor) -> Tensor:
        near, far = twin(x), twin(x.flip(0))
        pull = 1 - F.cosine_similarity(near, far.detach())
        return (pull + F.cosine_similarity(near, far)).mean()

    return train([module], loss_of)


def encoder_and_decoder(wrap: Wrap) -> list[nn.Module]:
    """Two networks one behind the other, with layers before, between and behind them."""
    first, encoder, between, decoder = (net(seed) for seed in range(4))
    whole = nn.Sequential(first, wrap(encoder), between, wrap(decoder))
    return train([first, encoder, between, decoder], lambda x: F.mse_loss(whole(x), x))


def policy_gradient(wrap: Wrap) -> list[nn.Module]:
    """Several calls of changing sizes and several backwards before an update."""
    policy = net(1)
    acts = wrap(policy)
    optimizer = adam(policy)
    for states in batches(3):
        optimizer.zero_grad()
        for rows in (ROWS, 3, 1):
            chances = acts(states[:rows]).log_softmax(1)
            actions = states[:rows].argmax(1)
            reward = states[:rows].sum(1)
            (-chances[torch.arange(rows), actions] * reward).sum().backward()
        optimizer.step()
    return [policy]


PROGRAMS = (gan, distillation, siamese, encoder_and_decoder, policy_gradient)
