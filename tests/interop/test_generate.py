"""`generate` of a model while a pipeline of it is open: the tokens of the model alone."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from tests.support.comparison import assert_same_gradients

from .test_hugging_face import batch, gpt2, llama, plain_step
from .test_peft import adapted, lora, pipeline, prefix, prompt

transformers = pytest.importorskip("transformers")

pytestmark = [
    # peft asks for names that transformers is about to rename.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    # And is given positions by `generate`, which it leaves out.
    pytest.mark.filterwarnings("ignore:Position ids are not supported"),
]

# transformers 5.24 has renamed the argument and the output.
_NAMES = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"


def tokens_of(model: Any, start: Tensor, *, draws: bool) -> Tensor:
    """Tokens that follow, with a cache, in the mode in which models generate."""
    model.eval()
    torch.manual_seed(7)
    found = model.generate(inputs=start, max_new_tokens=5, do_sample=draws)
    assert isinstance(found, Tensor)
    model.train()
    return found


CASES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "lora": partial(adapted, "llama", lora),
    "prefix": partial(adapted, "llama", prefix),
    "prompt": partial(adapted, "llama", prompt),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_between_steps_are_those_of_the_model_alone(case: str) -> None:
    model = CASES[case]().train()
    plain = copy.deepcopy(model)
    given = batch(padded=True, caches=True)
    start = given["input_ids"][:3, :4]

    def assert_same_tokens() -> None:
        for draws in (False, True):
            wanted = tokens_of(plain, start, draws=draws)
            assert torch.equal(tokens_of(model, start, draws=draws), wanted)

    with pipeline(model, given, schedule="zb_h1") as pipe:
        assert_same_tokens()
        # A rate at which the tokens change.
        optimizers = [torch.optim.SGD(each.parameters(), lr=5.0) for each in (model, plain)]
        before = tokens_of(plain, start, draws=False)
        for _ in range(2):
            assert torch.equal(pipe.step(**given), plain_step(plain, given))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_tokens()
        assert case == "prompt" or not torch.equal(before, tokens_of(plain, start, draws=False))
        # Between a forward and its backward.
        loss = pipe(**given).loss
        assert_same_tokens()
        loss.backward()
        plain_step(plain, given)
        assert_same_gradients(model, plain)


def test_a_cache_of_the_callers_is_refused() -> None:
    given = batch(padded=True, caches=False)
    message = r"is given a DynamicCache .* is an argument of the model.*generate\(\) is the model's"
    with pipeline(llama(), given) as pipe, pytest.raises(pykern.CutError, match=message):
        pipe.eval()(**given, **{CACHE: transformers.DynamicCache()})


def test_an_output_does_not_have_the_cache_of_the_stages() -> None:
    """The sample's would have been returned for every batch."""
    given = batch(padded=True, caches=False)
    model = llama()
    with pipeline(model, given) as pipe:
        output = pipe.eval()(**given)
        with torch.no_grad():
            wanted = model(**given)
        torch.testing.assert_close(output.logits, wanted.logits)
        with pytest.raises(AttributeError, match="returns a DynamicCache with tensors"):
            getattr(output, CACHE).get_seq_length()
    assert isinstance(model, nn.Module)
