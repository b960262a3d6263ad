"""Options that do not go with other processes are an error in each of them, before anything is
sent."""

from typing import Any

import torch

import pykern
from tests.parallel.data_runs import pipeline
from tests.parallel.reference import batch_of, layers
from tests.peers import run


def with_main_grad(rank: int) -> list[str]:
    chain = layers()
    x, y = batch_of(0, rank, 4)
    weight: Any = next(chain[1].parameters())
    messages = []
    with pipeline(chain, microbatches=2) as pipe:
        for main in (torch.zeros(6, 6), None):
            weight.main_grad = main
            try:
                messages.append(f"{pipe.step(x, target=y):.3f}")
            except (ValueError, pykern.PeerError) as error:
                messages.append(str(error))
    return messages


def test_a_main_grad_is_an_error() -> None:
    (refused, loss), (again, other) = run(2, with_main_grad)
    assert refused == again
    assert refused.startswith(
        "1.0.weight must collect gradients in .grad, which process_group sums, got a main_grad"
    )
    assert loss == other
