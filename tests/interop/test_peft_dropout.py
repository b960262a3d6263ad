"""Dropout in front of adapters: the masks of the plain model with the seeds of the stages."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.plain_step import by_microbatch

from .test_hugging_face import ROWS, batch, llama, parts
from .test_peft import assert_gradients, dora, lora, pipeline

peft = pytest.importorskip("peft")

# peft asks for names that transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

SECOND = "base_model.model.model.layers.2"
# For a microbatch, what runs at the beginning of a stage.
Seed = Callable[[int], object]


def with_dropout(config: Callable[..., Any], **options: Any) -> Any:
    adapters = config("llama", **options)
    adapters.lora_dropout = 0.3
    return peft.get_peft_model(llama(), adapters).train()


def plain_step(model: nn.Module, given: dict[str, Any]) -> Tensor:
    """Each stage of each microbatch begins with the numbers that pykern documents."""
    of_each = list(parts(given))

    def loss_of(index: int, seed: Seed) -> Tensor:
        seed(0)

        def second(*_: object) -> None:
            seed(1)

        hook = model.get_submodule(SECOND).register_forward_pre_hook(second)
        try:
            loss: Tensor = model(**of_each[index]).loss
            return loss
        finally:
            hook.remove()

    return by_microbatch(model, [ROWS] * len(of_each), loss_of)


def assert_the_masks_of_the_plain_model(
    model: Any, schedule: str, recompute: Any, outside: bool
) -> None:
    plain = copy.deepcopy(model)
    given = batch(padded=True, caches=True)
    options = {"schedule": schedule, "recompute": recompute, "split_at": [SECOND]}
    with pipeline(model, given, **options) as pipe:
        losses = []
        for _ in range(2):
            before = torch.get_rng_state()
            if outside:
                loss = pipe(**given).loss
                loss.backward()
            else:
                loss = pipe.step(**given)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            assert torch.equal(loss, plain_step(plain, given))
            torch.set_rng_state(after)
            assert_gradients(model, plain)
            losses.append(loss.item())
            model.zero_grad()
            plain.zero_grad()
    # The masks differ from step to step.
    assert losses[0] != losses[1]


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_lora_with_dropout(schedule: str, recompute: str) -> None:
    assert_the_masks_of_the_plain_model(with_dropout(lora), schedule, recompute, False)


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
def test_lora_with_dropout_and_a_loss_outside(recompute: str) -> None:
    assert_the_masks_of_the_plain_model(with_dropout(lora), "gpipe", recompute, True)


# Stage 0 then has nothing to train.
only_in_the_second = partial(lora, layers_to_transform=[2, 3])


@pytest.mark.parametrize("config", [dora, only_in_the_second])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_other_adapters_with_dropout(config: Callable[..., Any], schedule: str) -> None:
    assert_the_masks_of_the_plain_model(with_dropout(config), schedule, "layer", False)
