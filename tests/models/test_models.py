"""Every model computes what its twin in plain torch does, whatever its operations keep."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pykern.kernels.levels import keeping
from pykern.models import bert, gpt, llama, moe
from pykern.models.moe import with_balance
from tests.models.cases import LENGTH, MODELS, VOCAB, answer, case
from tests.models.plain import plain

MAKERS: tuple[Any, ...] = (gpt, bert, llama, moe)
WRONG: Any = "x"
NOTHING: Any = None
LIST: Any = [1]


@pytest.mark.parametrize("fused_loss", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_a_model_equals_its_plain_twin(name, dtype, error, fused_loss):
    ours = case(name, fused_loss=fused_loss)
    ours.model.to(dtype)
    loss, gradients = answer(ours, ours.model)
    theirs = replace(ours, loss_fn=case(name).loss_fn)
    expected_loss, expected = answer(theirs, plain(ours.model))
    assert loss.item() == pytest.approx(expected_loss.item(), rel=error)
    for parameter, gradient in expected.items():
        size = gradient.norm()
        assert size > 0, parameter
        assert (gradients[parameter] - gradient).norm() <= error * size, parameter


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_twin_s_outside_training(name):
    ours = case(name, fused_loss=True)
    ours.model.eval()
    logits = ours.model(ours.ids)
    assert logits.shape == (3, LENGTH, VOCAB)
    torch.testing.assert_close(logits, plain(ours.model)(ours.ids))


@pytest.mark.parametrize("name", MODELS)
def test_to_keep_less_changes_no_bit(name):
    ours = case(name, dropout=0.3)
    answers = []
    for level in ("none", "ops"):
        torch.manual_seed(3)
        with keeping(level):
            answers.append(answer(ours, ours.model))
    (loss, gradients), (same_loss, same_gradients) = answers
    assert torch.equal(loss, same_loss)
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, same_gradients[parameter]), parameter


@pytest.mark.parametrize("by_autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_costs_no_more_than_it_costs_plain_torch(name, by_autocast):
    ours = case(name, rows=8)
    dtype = torch.float32 if by_autocast else torch.bfloat16
    ours.model.to(dtype)
    exact_loss, exact = answer(ours, plain(ours.model).double())
    with torch.autocast("cpu", torch.bfloat16, enabled=by_autocast):
        loss, gradients = answer(ours, ours.model)
        their_loss, theirs = answer(ours, plain(ours.model))
    assert (loss - exact_loss).abs() <= 2 * (their_loss - exact_loss).abs() + 0.005 * exact_loss
    for parameter, gradient in gradients.items():
        assert gradient.dtype is dtype
        errors = [(found[parameter] - exact[parameter]).norm() for found in (gradients, theirs)]
        assert errors[0] <= 2 * errors[1] + 0.01 * exact[parameter].norm(), parameter


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_from_8_bits(name):
    ours = case(name)
    exact = answer(ours, ours.model)[1]
    optimizer = torch.optim.AdamW(ours.model.parameters(), lr=1e-2)
    losses = []
    with keeping("ops+stash"):
        rounded = answer(ours, ours.model)[1]
        for _ in range(40):
            optimizer.zero_grad()
            losses.append(answer(ours, ours.model)[0].item())
            optimizer.step()
    errors = [(rounded[p] - exact[p]).norm() / exact[p].norm() for p in exact]
    assert 0 < max(errors) < 0.05
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights_and_torch_s_state_is_left_alone(name):
    state = torch.get_rng_state()
    first, same, other = (MODELS[name](seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(first.parameters(), same.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_no_position_sees_what_follows(name):
    ours = case(name)
    ours.model.eval()
    changed = ours.ids.clone()
    changed[:, 7:] = 1
    before, after = ours.model(ours.ids), ours.model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_padding_is_not_looked_at():
    model = MODELS["bert"]().eval()
    short = torch.randint(1, VOCAB, (1, 7))
    filled = torch.cat([short, torch.zeros(1, 5, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(filled)[:, :7], model(short))
    changed = filled.clone()
    changed[0, 6] = changed[0, 6] % (VOCAB - 1) + 1
    assert not torch.allclose(model(changed)[:, 0], model(filled)[:, 0])


def test_a_tied_head_has_the_embedding_s_weight():
    model = MODELS["gpt tied"]()
    assert model.get_parameter("5.logits.weight") is model.get_parameter("0.tokens.weight")
    assert "5.logits.weight" not in dict(model.named_parameters())


def test_balance_is_in_the_loss_of_training_only():
    ours = case("moe")
    logits, balance = ours.model(ours.ids)
    # Two routers; each is at best 1.
    assert 1.9 < balance.item() < 3
    assert ours.loss_fn((logits, balance), ours.target) > ours.loss_fn(
        (logits, balance * 0), ours.target
    )
    with torch.no_grad():
        assert isinstance(ours.model(ours.ids), torch.Tensor)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llama(kv_heads=0), "kv_heads must be 1 to 16777216, got 0"),
        (lambda: llama(width=24, heads=8), "width / heads must be even, got 3"),
        (lambda: llama(heads=8, kv_heads=3), "kv_heads must divide heads, 8, got 3"),
        # The first forward refused 0.5, and only then.
        (lambda: llama(base=0.5), "base must be above 1 and finite, got 0.5"),
        (lambda: moe(base=math.inf), "base must be above 1 and finite, got inf"),
        (lambda: moe(num_chosen=9), "num_chosen must be at most 8, the number of experts, got 9"),
        (lambda: moe(hidden=20), "hidden must be a multiple of 8, got 20"),
        (lambda: bert(padding=256), "padding must be a token, 0 <= padding < .*, got 256"),
        (lambda: bert(dropout=-0.1), "dropout must be at least 0 and below 1, got -0.1"),
    ],
)
def test_impossible_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpt(dropout=WRONG), "dropout must be a number, got 'x'"),
        (lambda: gpt(tied=WRONG), "tied must be True or False, got 'x'"),
        (lambda: bert(dropout=NOTHING), "dropout must be a number, got None"),
        (lambda: bert(padding=WRONG), "padding must be an int, got 'x'"),
        (lambda: llama(base=WRONG), "base must be a number, got 'x'"),
        (lambda: moe(base=LIST), r"base must be a number, got \[1\]"),
        (lambda: with_balance(WRONG), "loss_fn must be callable, got 'x'"),
        (lambda: with_balance(torch.add, WRONG), "coefficient must be a number, got 'x'"),
        *(
            (lambda make=make: make(seed=WRONG), "seed must be an int, got 'x'")
            for make in (gpt, bert, llama, moe)
        ),
        *(
            (lambda make=make: make(fused_loss=1), "fused_loss must be True or")
            for make in (gpt, bert, llama, moe)
        ),
    ],
)
def test_wrong_types_are_refused(make, message):
    """Python's words and torch's came."""
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1])
def test_seeds_that_torch_does_not_take_are_refused(seed):
    with pytest.raises(ValueError, match=r"seed must be -2\*\*63 to 2\*\*64 - 1, got "):
        gpt(seed=seed)
