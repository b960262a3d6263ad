"""The reference GPT: shapes, causality, seeds, and a loss that falls."""

import math

import pytest
import torch
import torch.nn.functional as F

from pykern.models import gpt, next_token_loss

IDS = torch.arange(2 * 12).view(2, 12) * 7 % 256


def small(**changes: object) -> torch.nn.Sequential:
    sizes: dict[str, object] = {"layers": 2, "width": 16, "heads": 2, "context": 12}
    return gpt(**(sizes | changes))  # type: ignore[arg-type]


def test_half_a_block_is_a_layer() -> None:
    names = [type(layer).__name__ for layer in small()]
    assert names == ["Embedding", "Attention", "MLP", "Attention", "MLP", "Head"]


def test_every_position_scores_every_token() -> None:
    assert small()(IDS).shape == (2, 12, 256)
    assert small(vocab=300)(IDS).shape == (2, 12, 300)


def test_no_position_sees_what_follows() -> None:
    model = small()
    changed = IDS.clone()
    changed[:, 7:] = 1
    before, after = model(IDS), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_position_knows_where_it_is() -> None:
    logits = small()(torch.full((1, 12), 65))
    assert not torch.allclose(logits[0, 3], logits[0, 4], atol=1e-4)


def test_the_seed_decides_the_weights_and_torch_s_state_is_left_alone() -> None:
    random_state = torch.get_rng_state()
    first, same, other = small(seed=1), small(seed=1), small(seed=2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(first(IDS), same(IDS))
    assert not torch.equal(first(IDS), other(IDS))


def test_a_new_model_knows_nothing() -> None:
    loss = next_token_loss(small()(IDS), IDS)
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_dropout_works_in_training_only() -> None:
    model = small(dropout=0.5)
    assert not torch.equal(model(IDS), model(IDS))
    model.eval()
    assert torch.equal(model(IDS), model(IDS))


def test_the_loss_is_the_mean_over_positions() -> None:
    logits, target = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = -F.log_softmax(logits, dim=-1).gather(2, target[..., None]).mean()
    torch.testing.assert_close(next_token_loss(logits, target), by_hand)


def test_it_learns_by_heart() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.tensor(torch.inf)
    for _ in range(60):
        optimizer.zero_grad()
        loss = next_token_loss(model(IDS[:, :-1]), IDS[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be 1 to 16777216, got 0"),
        ({"width": 15}, "heads must divide width, 15, got 2"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a sequence must have at most 12 tokens, the model's context, got 13"
    ):
        small()(torch.zeros(1, 13, dtype=torch.int64))
