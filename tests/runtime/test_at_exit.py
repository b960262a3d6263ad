"""The end of a program closes pipelines while other threads make some."""

import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn

import pykern
from pykern.runtime import at_exit
from tests.runtime.test_exit import run_python


def opened() -> pykern.Pipeline:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    return pykern.Pipeline(layers, devices="cpu:2", microbatches=1)


def test_pipelines_are_closed_while_another_thread_makes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[pykern.Pipeline] = []
    threads: list[threading.Thread] = []

    class ReadSlowly(WeakSet[Any]):
        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                yield each
                if not threads:
                    threads.append(threading.Thread(target=lambda: made.append(opened())))
                    threads[0].start()
                    threads[0].join(1.0)

    monkeypatch.setattr(at_exit, "_open", ReadSlowly())
    before = [opened(), opened()]
    at_exit.close_all()
    for pipe in before:
        with pytest.raises(RuntimeError, match="the pipeline is closed"):
            pipe(torch.ones(1, 2))
    threads[0].join()
    assert made[0](torch.ones(1, 2)).shape == (1, 2)
    made[0].close()


def test_a_late_pipeline_runs_steps_as_earlier_ones_did() -> None:
    """Before, torch's exit handler removes what libraries have registered."""
    result = run_python(
        """
        def late():
            with pykern.Pipeline([Slow(), nn.Dropout(0.0)], devices="cpu:2", microbatches=4) as own:
                print(torch.equal(own(x), 2 * x))
        late()
        """,
        before="import atexit; atexit.register(lambda: late())",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\nTrue\n", "")
