"""peft's adapters as they are: the bits of the model alone, and no gradient on a frozen base."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from tests.support.comparison import assert_same_gradients

from .test_hugging_face import batch, gpt2, llama, parts, plain_step

peft = pytest.importorskip("peft")

# peft asks for names that transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

GIVEN = {"task_type": "CAUSAL_LM"}
LAYERS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn", "c_proj"]}
SCALED = {"llama": ["k_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "mlp.c_proj"]}
MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2}


def lora(name: str, **options: Any) -> Any:
    # The usual start, B = 0, has no gradients for A.
    return peft.LoraConfig(
        r=4,
        target_modules=LAYERS[name],
        fan_in_fan_out=name == "gpt2",
        init_lora_weights=False,
        **GIVEN,
        **options,
    )


def dora(name: str) -> Any:
    return lora(name, use_dora=True)


def lora_of_the_last_layers(name: str) -> Any:
    return lora(name, layers_to_transform=[2, 3])


def lora_and_the_head(name: str) -> Any:
    return lora(name, modules_to_save=["lm_head"])


def ia3(name: str) -> Any:
    feedforward = SCALED[name][-1:]
    return peft.IA3Config(
        target_modules=SCALED[name],
        feedforward_modules=feedforward,
        fan_in_fan_out=name == "gpt2",
        init_ia3_weights=False,
        **GIVEN,
    )


def prompt(_: str) -> Any:
    return peft.PromptTuningConfig(num_virtual_tokens=3, **GIVEN)


def prompt_encoder(_: str) -> Any:
    return peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, **GIVEN)


def prefix(_: str) -> Any:
    return peft.PrefixTuningConfig(num_virtual_tokens=3, **GIVEN)


def adaption_prompt(_: str) -> Any:
    return peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, **GIVEN)


ADAPTERS = [
    *(lora, dora, lora_of_the_last_layers, lora_and_the_head),
    *(ia3, prompt, prompt_encoder, prefix, adaption_prompt),
]


def adapted(name: str, adapter: Callable[[str], Any]) -> Any:
    return peft.get_peft_model(MODELS[name](), adapter(name)).train()


def pipeline(model: nn.Module, given: dict[str, Any], **options: Any) -> pykern.Pipeline:
    options = {"devices": "cpu:2", "microbatches": 4, **options}
    return pykern.Pipeline(
        model, loss_fn=lambda output: output.loss, sample=next(parts(given)), **options
    )


def assert_gradients(model: nn.Module, plain: nn.Module) -> None:
    """The model has the gradients of the plain one, and none on frozen parameters."""
    assert_same_gradients(model, plain)
    assert all(each.requires_grad or each.grad is None for each in model.parameters())


def require_the_bits(
    name: str, adapter: Callable[[str], Any], *, outside: bool, **options: Any
) -> None:
    model = adapted(name, adapter)
    plain = copy.deepcopy(model)
    given = batch(padded=True, caches=True)
    with pipeline(model, given, **options) as pipe:
        for _ in range(3):
            if outside:
                loss = pipe(**given).loss
                loss.backward()
            else:
                loss = pipe.step(**given)
            assert torch.equal(loss, plain_step(plain, given))
            assert_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()
    assert any(parameter.requires_grad for parameter in plain.parameters())
    assert not all(parameter.requires_grad for parameter in plain.parameters())


@pytest.mark.parametrize(
    ("name", "adapter"),
    [("gpt2", lora), ("gpt2", prefix), *(("llama", adapter) for adapter in ADAPTERS)],
)
@pytest.mark.parametrize("outside", [False, True])
def test_adapters_train_as_in_the_model(
    name: str, adapter: Callable[[str], Any], outside: bool
) -> None:
    schedule = "gpipe" if outside else "zb_h1"
    require_the_bits(name, adapter, outside=outside, schedule=schedule)


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("devices", ["cpu:2", "cpu:3"])
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("outside", [False, True])
def test_adapters_in_every_schedule(
    name: str,
    adapter: Callable[[str], Any],
    outside: bool,
    schedule: str,
    devices: str,
    recompute: str,
) -> None:
    options = {"schedule": schedule, "devices": devices, "recompute": recompute}
    require_the_bits(name, adapter, outside=outside, **options)


def vera(_: str) -> Any:
    return peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"], **GIVEN)


@pytest.mark.parametrize("outside", [False, True])
def test_projections_that_all_layers_share_are_not_said_to_be_written(outside: bool) -> None:
    """The step recorded the batch's shapes, and then took what it had put back for a write."""
    require_the_bits("llama", vera, outside=outside, schedule="gpipe")


def trained_pair(given: dict[str, Any]) -> tuple[Any, Any]:
    """A model after two steps in a pipeline, and one after two of its own."""
    model = adapted("llama", lora)
    plain = copy.deepcopy(model)
    with pipeline(model, given) as pipe:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
        for _ in range(2):
            pipe.step(**given)
            plain_step(plain, given)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # Within the pipeline as well as after it.
        assert_same_state(peft.get_peft_model_state_dict(model), plain)
    return model, plain


def assert_same_state(state: dict[str, Tensor], plain: nn.Module) -> None:
    wanted = peft.get_peft_model_state_dict(plain)
    assert list(state) == list(wanted)
    for name, value in state.items():
        assert torch.equal(value, wanted[name]), name


def test_adapters_are_saved_and_loaded_alone(tmp_path: Path) -> None:
    given = batch(padded=True, caches=True)
    model, plain = trained_pair(given)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    base = copy.deepcopy(plain).unload()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True).train()
    assert_same_state(peft.get_peft_model_state_dict(loaded), plain)
    # The loaded adapter trains in another pipeline.
    with pipeline(loaded, given, devices="cpu:3") as pipe:
        assert torch.equal(pipe.step(**given), plain_step(plain, given))
    assert_gradients(loaded, plain)


def test_a_merged_model_and_its_tokens_are_those_of_the_model_alone() -> None:
    given = batch(padded=True, caches=True)
    model, plain = trained_pair(given)
    asked = {"inputs": given["input_ids"][:2, :4], "max_new_tokens": 5, "do_sample": False}
    for one in (model, plain):
        one.eval()
    assert torch.equal(model.generate(**asked), plain.generate(**asked))
    merged, wanted = model.merge_and_unload(), plain.merge_and_unload()
    names = list(llama().state_dict())
    assert list(merged.state_dict()) == list(wanted.state_dict()) == names
    for name, value in merged.state_dict().items():
        assert torch.equal(value, wanted.state_dict()[name]), name
    assert torch.equal(merged.generate(**asked), wanted.generate(**asked))
