"""Random numbers of an action on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pykern.runtime.random.draws import Draws
from pykern.runtime.random.seed import StepSeed, action_seed

pytestmark = pytest.mark.gpu


def started(seed: StepSeed) -> Draws:
    draws = Draws(3)
    draws.begin(seed, None)
    return draws


def test_an_action_draws_what_the_seeded_plain_model_does() -> None:
    x = torch.ones(1000, device="cuda")

    def draw() -> list[Tensor]:
        return [F.dropout(x), torch.rand(4), torch.rand(4, device="cuda"), x.bernoulli(0.5)]

    seed = StepSeed()
    callers = torch.cuda.get_rng_state()
    with started(seed).forward(5):
        found = draw()
    assert torch.equal(torch.cuda.get_rng_state(), callers)
    torch.manual_seed(action_seed(seed.value(), 3, 5))
    assert all(map(torch.equal, found, draw()))


def test_attention_draws_only_with_dropout() -> None:
    query = torch.ones(1, 2, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    for dropout, draws_numbers in ((0.0, False), (0.5, True)):
        draws = started(StepSeed())
        with draws.forward(0):
            F.scaled_dot_product_attention(query, query, query, dropout_p=dropout)
        assert draws.possible is draws_numbers
