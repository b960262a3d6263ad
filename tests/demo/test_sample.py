"""The sample: bytes drawn from a model by its chances, and safe to print."""

import torch
from torch import Tensor

from pykern.demo.sample import generate, printable


def successor(ids: Tensor) -> Tensor:
    """Logits of a model that is certain that n follows n - 1."""
    return 100.0 * torch.nn.functional.one_hot((ids + 1) % 256, 256).float()


def test_the_likely_byte_follows() -> None:
    assert generate(successor, b"a", 5, context=4, temperature=1.0, seed=0) == b"abcdef"


def test_the_model_never_sees_more_than_its_context() -> None:
    lengths = []

    def watch(ids: Tensor) -> Tensor:
        lengths.append(ids.shape[1])
        return successor(ids)

    generate(watch, b"ab", 4, context=3, temperature=1.0, seed=0)
    assert lengths == [2, 3, 3, 3]


def test_the_seed_decides_what_is_drawn() -> None:
    def undecided(ids: Tensor) -> Tensor:
        return torch.zeros(1, ids.shape[1], 256)

    first, same, other = (generate(undecided, b"a", 20, 8, 1.0, seed) for seed in (0, 0, 1))
    assert first == same != other


def test_a_low_temperature_takes_no_risks() -> None:
    def leaning(ids: Tensor) -> Tensor:
        logits = torch.zeros(1, ids.shape[1], 256)
        logits[..., 65] = 1.0
        return logits

    assert generate(leaning, b"x", 20, 8, temperature=0.01, seed=0) == b"x" + b"A" * 20


def test_no_byte_reaches_the_terminal_s_controls() -> None:
    shown = printable(b"ok\x1b[31m\r\x07\xff\n\tend")
    assert shown == "ok\ufffd[31m\ufffd\ufffd\ufffd\n    end"
