"""The random generators that a training loop draws from: torch's, Python's and numpy's."""

import base64
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..plan.files.strict_json import shown
from .errors import CheckpointError
from .form import require_names
from .model_state import Commit

_WORDS = 624

# The exceptions of generators, and of reading numbers out of values of any kind.
_NO_STATE = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)


def random_state() -> dict[str, Any]:
    """The state of each generator, in values that JSON has; GPUs are included if torch uses them.

    Raises:
        CheckpointError: numpy's global generator was replaced by one of another kind.
    """
    numpy_state = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator must be MT19937, got {shown(numpy_state['bit_generator'])}. "
            "Save its state in extra, and call with rng=False"
        )
    version, words, gauss = random.getstate()
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if _uses_cuda() else [],
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "words": numpy_state["state"]["key"].tolist(),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def fit_random(saved: Any) -> Commit:
    """A function that sets the generators; GPUs' are set if their number is that of the file.

    Each state is first tried on a new generator.

    Raises:
        CheckpointError: a state is not valid for its generator.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"the random state must be a dict, got {shown(saved)}")
    require_names({"torch", "cuda", "python", "numpy"}, saved.keys(), "the random state")
    torch_state = _tried("torch", lambda: _torch_state(saved["torch"]))
    python_state = _tried("python", lambda: _python_state(saved["python"]))
    numpy_state = _tried("numpy", lambda: _numpy_state(saved["numpy"]))
    cuda_states = _tried("cuda", lambda: _cuda_states(saved["cuda"]))

    def commit() -> None:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for index, state in enumerate(cuda_states):
            torch.cuda.set_rng_state(state, index)

    return commit


def _tried(name: str, state: Callable[[], Any]) -> Any:
    try:
        return state()
    except _NO_STATE as error:
        raise CheckpointError(
            f"the state of the {name} generator is invalid: {error}. Load with rng=False"
        ) from error


def _torch_state(text: str) -> Tensor:
    state = _bytes(text)
    torch.Generator().set_state(state)
    return state


def _cuda_states(texts: list[str]) -> list[Tensor]:
    if not isinstance(texts, list):
        raise TypeError(f"states must be a list, got {shown(texts)}")
    states = [_bytes(text) for text in texts]
    if not _uses_cuda() or len(states) != torch.cuda.device_count():
        return []
    for index, state in enumerate(states):
        torch.Generator(f"cuda:{index}").set_state(state)
    return states


def _python_state(saved: dict[str, Any]) -> tuple[Any, ...]:
    state = (saved["version"], tuple(saved["words"]), saved["gauss"])
    if type(saved["gauss"]) not in (float, type(None)):
        raise TypeError(f"gauss must be a float or None, got {shown(saved['gauss'])}")
    random.Random().setstate(state)
    return state


def _numpy_state(saved: dict[str, Any]) -> tuple[Any, ...]:
    """The state, checked here because numpy accepts a position behind the words and reads there."""
    words, position = saved["words"], saved["position"]
    if len(words) != _WORDS or type(position) is not int or not 0 <= position <= _WORDS:
        raise ValueError(
            f"the state must have {_WORDS} words and a position of 0 to {_WORDS}, got {len(words)} "
            f"words and position {shown(position)}"
        )
    state = ("MT19937", words, position, saved["has_gauss"], saved["gauss"])
    np.random.RandomState().set_state(state)
    return state


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _bytes(text: str) -> Tensor:
    data = base64.b64decode(text.encode("ascii"), validate=True)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
