"""Hugging Face's models as they are: the bits of the model alone, microbatch by microbatch."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from tests.support.comparison import assert_same_gradients
from tests.support.plain_step import by_microbatch

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ROWS = 2


def gpt2(*, tied: bool = False) -> Any:
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": tied}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, **ends))


def llama() -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**SIZES, **rates, tie_word_embeddings=False)
    return transformers.BertForMaskedLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config)


def batch(*, padded: bool, caches: bool) -> dict[str, Any]:
    tokens = torch.randint(0, 64, (8, 12))
    found: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if caches:
        found["use_cache"] = False
    if padded:
        found["attention_mask"] = torch.ones_like(tokens)
        found["attention_mask"][3, 9:] = 0
    return found


def parts(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for start in range(0, 8, ROWS):
        rows = slice(start, start + ROWS)
        yield {name: v[rows] if isinstance(v, Tensor) else v for name, v in batch.items()}


def plain_step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    given = list(parts(batch))
    return by_microbatch(model, [ROWS] * len(given), lambda index, _: model(**given[index]).loss)


@pytest.mark.parametrize("make", [gpt2, llama, bert, mixtral])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_training_and_evaluation_are_the_models(make: Callable[[], Any], schedule: str) -> None:
    model = make().train()
    plain = copy.deepcopy(model)
    names = list(plain.state_dict())
    batches = [batch(padded=padded, caches=make is not bert) for padded in (True, False, False)]
    sample = next(parts(batches[0]))
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        schedule=schedule,
        microbatches=4,
        loss_fn=lambda output: output.loss,
        sample=sample,
    ) as pipe:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (pipe, plain)]
        for given in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            assert torch.equal(pipe.step(**given), plain_step(plain, given))
            for optimizer in optimizers:
                optimizer.step()
        assert list(pipe.state_dict()) == names
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
        pipe.eval()
        plain.eval()
        for given in batches:
            ours = pipe(**given)
            with torch.no_grad():
                theirs = [plain(**part) for part in parts(given)]
            assert type(ours) is type(theirs[0])
            assert torch.equal(ours.logits, torch.cat([output.logits for output in theirs]))
            assert torch.isclose(ours.loss, torch.stack([o.loss for o in theirs]).mean())


def test_a_tied_head_trains_over_stages() -> None:
    model = gpt2(tied=True).train()
    plain = copy.deepcopy(model)
    given = batch(padded=True, caches=True)
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=4,
        loss_fn=lambda output: output.loss,
        sample=next(parts(given)),
    ) as pipe:
        assert torch.equal(pipe.step(**given), plain_step(plain, given))
    assert model.lm_head.weight is model.transformer.wte.weight
    # The head's sum is added to the embedding's: other roundings than in one backward.
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def mistral() -> Any:
    # Its caches have a window.
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)
    return transformers.MistralForCausalLM(config)


def mamba2() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}
    heads = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, **heads))


@pytest.mark.parametrize("make", [gpt2, llama, mistral, mamba2])
def test_models_with_the_caches_that_they_make(make: Callable[[], Any]) -> None:
    """Without use_cache=False, which their configurations do not say, they were refused."""
    model = make().train()
    plain = copy.deepcopy(model)
    given = batch(padded=False, caches=False) | {"use_cache": True}
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        schedule="zb_h1",
        microbatches=4,
        recompute="layer",
        loss_fn=lambda output: output.loss,
        sample=next(parts(given)),
    ) as pipe:
        assert torch.equal(pipe.step(**given), plain_step(plain, given))
        assert_same_gradients(model, plain)


def rwkv() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "attention_hidden_size": 16, "context_length": 16}
    # `rescale_every` scales weights in eval mode.
    config = transformers.RwkvConfig(**sizes, num_hidden_layers=4, rescale_every=2)
    return transformers.RwkvForCausalLM(config)


def longformer() -> Any:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.LongformerForMaskedLM(
        transformers.LongformerConfig(**SIZES, **rates, attention_window=[4] * 4)
    )


@pytest.mark.parametrize("make", [rwkv, longformer])
def test_models_that_look_at_their_masks_or_scale_their_weights(make: Callable[[], Any]) -> None:
    """One did not evaluate, the other was said to read what it had computed."""
    model = make().train()
    plain = copy.deepcopy(model)
    given = batch(padded=make is longformer, caches=make is rwkv)
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=4,
        loss_fn=lambda output: output.loss,
        sample=next(parts(given)),
    ) as pipe:
        for _ in range(3):
            pipe.train()
            plain.train()
            assert torch.equal(pipe.step(**given), plain_step(plain, given))
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            pipe.eval()
            plain.eval()
            with torch.no_grad():
                outputs = [plain(**part) for part in parts(given)]
            assert torch.equal(pipe(**given).logits, torch.cat([each.logits for each in outputs]))
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs)


def test_masks_that_numpy_draws_are_refused_unless_they_are_switched_off() -> None:
    """SpecAugment had the sample's masks in every step."""
    config = transformers.Wav2Vec2Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(16,),
        conv_stride=(20,),
        conv_kernel=(20,),
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.0,
        mask_time_prob=0.3,
        mask_time_length=2,
    )
    model = transformers.Wav2Vec2ForCTC(config).train()
    sample = {"input_values": torch.randn(ROWS, 1000)}
    with pytest.raises(pykern.CutError, match=r"from numpy\.random \(modeling_wav2vec2\.py:\d+"):
        pykern.Pipeline(model, devices="cpu:2", microbatches=2, sample=sample)
    whole = pykern.Pipeline(
        model, devices="cpu:2", microbatches=2, sample=sample, whole=["wav2vec2"]
    )
    whole.close()
    config.apply_spec_augment = False
    pykern.Pipeline(model, devices="cpu:2", microbatches=2, sample=sample).close()
