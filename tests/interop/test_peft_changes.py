"""Adapters that are switched, added, taken away and merged while a pipeline is open."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pykern
from pykern import schedules
from pykern.plan import Plan

from .test_hugging_face import batch, parts, plain_step
from .test_peft import adapted, assert_gradients, lora, pipeline, prefix

peft = pytest.importorskip("peft")

# peft asks for names that transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def added(model: Any) -> None:
    torch.manual_seed(3)
    model.add_adapter("third", lora("llama"))
    model.set_adapter("third")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "another": lambda model: model.set_adapter("second"),
    "a new one": added,
    "one less": lambda model: model.delete_adapter("second"),
    "merged and not": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
}


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_adapters_change_between_steps(schedule: str) -> None:
    model = adapted("llama", lora)
    model.add_adapter("second", lora("llama"))
    plain = copy.deepcopy(model)
    given = batch(padded=True, caches=True)
    with pipeline(model, given, schedule=schedule) as pipe:
        for change in CHANGES.values():
            for each in (model, plain):
                change(each)
            assert torch.equal(pipe.step(**given), plain_step(plain, given))
            assert_gradients(model, plain)
            for each in (model, plain):
                each.zero_grad()
        # As a reference in preference tuning.
        with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
            wanted = torch.cat([plain(**part).logits for part in parts(given)])
            assert torch.equal(pipe(**given).logits, wanted)
        model.merge_adapter()
        with pytest.raises(RuntimeError, match="depends on nothing that trains"):
            pipe.step(**given)


def second_half(_: str) -> Any:
    return lora("llama", layers_to_transform=[2, 3])


# In the plan a stage that has nothing to train: in front of those that train, or behind them.
@pytest.mark.parametrize(("adapter", "frozen"), [(second_half, 0), (prefix, 1)])
@pytest.mark.parametrize("make", [schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1])
def test_plans_with_frozen_stages(
    adapter: Callable[[str], Any], frozen: int, make: Callable[[int, int], Plan]
) -> None:
    model = adapted("llama", adapter)
    plain = copy.deepcopy(model)
    given = batch(padded=True, caches=True)
    (name,) = [name for name, _ in model.named_modules() if name.endswith("layers.2")]
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        schedule=make(2, 4).with_frozen([frozen]),
        split_at=[name],
        loss_fn=lambda output: output.loss,
        sample=next(parts(given)),
    ) as pipe:
        for _ in range(3):
            assert torch.equal(pipe.step(**given), plain_step(plain, given))
            assert_gradients(model, plain)
