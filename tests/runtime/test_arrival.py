"""How exceptions arrive: the same object, its notes, in the order of the batches."""

import asyncio
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from tests.runtime.streaming import numbered, pipeline

BATCH = torch.ones(2, 2)


class Raises(nn.Module):
    """Raises what it is given for a batch of one number, or all."""

    def __init__(self, error: BaseException | None = None, number: float | None = None) -> None:
        super().__init__()
        self.error, self.number = error, number

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None and self.number in (None, x[0, 0].item()):
            raise self.error
        return x


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


class Loud(Exception):
    """Its `add_note` and repr fail, the latter with what no one expects."""

    def add_note(self, _: str) -> None:
        raise SystemExit

    def __repr__(self) -> str:
        raise KeyboardInterrupt


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Nothing can be set."""

    number: int = 1


class Deaf(Exception):
    """Its notes cannot be asked for."""

    @property
    def __notes__(self) -> Any:  # type: ignore[override]
        raise GeneratorExit


def with_tuple() -> BaseException:
    error = ValueError("planted")
    error.__notes__ = ("mine",)  # type: ignore[assignment]
    return error


ERRORS: list[Callable[[], BaseException]] = [
    Loud,
    Frozen,
    Deaf,
    with_tuple,
    lambda: ExceptionGroup("several", [ValueError(1), TypeError(2)]),
    lambda: SystemExit(3),
    GeneratorExit,
    asyncio.CancelledError,
    KeyboardInterrupt,
]


@pytest.mark.parametrize("make", ERRORS)
def test_any_exception_arrives_as_it_is(make: Callable[[], BaseException]) -> None:
    error = make()
    layer = Raises(error)
    with pykern.Pipeline([nn.Identity(), layer], devices="cpu:2", microbatches=2) as pipe:
        for call in (lambda: pipe(BATCH), lambda: list(pipe.stream([BATCH] * 3))):
            with pytest.raises(type(error)) as caught:
                call()
            assert caught.value is error
        layer.error = None
        assert torch.equal(pipe(BATCH), BATCH)
        layer.error = error
        with pytest.raises(type(error)) as caught:
            list(pipe.stream([BATCH] * 3))
        assert caught.value is error


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_the_note_tells_the_batch(number: int, warm: bool) -> None:
    layer = Raises(ValueError("planted"), number)
    with pykern.Pipeline([nn.Identity(), layer], devices="cpu:2", microbatches=1) as pipe:
        if warm:
            pipe(-BATCH)
        outputs: list[Tensor] = []
        with pytest.raises(ValueError, match="planted") as caught:
            outputs.extend(pipe.stream(numbered(6)))
        assert notes(caught.value) == [
            f"pykern: raised in batch {number} of the stream",
            "pykern: raised in stage 1, microbatch 0, action 1F0, device 1",
        ]


def test_an_exception_raised_again_has_the_notes_of_its_last_time() -> None:
    error = ValueError("planted")
    error.add_note("mine")
    first, last = Raises(), Raises(error)
    with pykern.Pipeline([first, last], devices="cpu:2", microbatches=1) as pipe:
        for stage in (1, 1, 0):
            first.error, last.error = (error, None) if stage == 0 else (None, error)
            with pytest.raises(ValueError, match="planted"):
                pipe(BATCH)
            assert notes(error) == [
                "mine",
                f"pykern: raised in stage {stage}, microbatch 0, action {stage}F0, device {stage}",
            ]


def test_the_notes_of_a_pipeline_within_a_stage_stay() -> None:
    error = ValueError("planted")
    with pykern.Pipeline([nn.Identity(), Raises(error)], devices="cpu:2", microbatches=1) as inner:

        class Calls(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return inner(x)

        with pykern.Pipeline([Calls(), nn.Identity()], devices="cpu:2", microbatches=1) as pipe:
            for _ in range(2):
                with pytest.raises(ValueError, match="planted"):
                    pipe(BATCH)
                assert notes(error) == [
                    "pykern: raised in stage 1, microbatch 0, action 1F0, device 1",
                    "pykern: raised in stage 0, microbatch 0, action 0F0, device 0",
                ]


def test_a_second_failure_that_cannot_be_shown_is_mentioned() -> None:
    first, ready = ValueError("first"), []

    class Later(nn.Module):
        """Fails when the other stage has."""

        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] > 0:
                return x
            ready.append(True)
            while not failed:
                pass
            raise Loud

    failed: list[bool] = []

    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] > 0:
                while not ready:
                    pass
                failed.append(True)
                raise first
            return x

    batch = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    with (
        pykern.Pipeline([First(), Later()], devices="cpu:2", microbatches=2) as pipe,
        pytest.raises(ValueError, match="first") as caught,
    ):
        pipe(batch)
    assert caught.value is first
    note = "failed as well: a Loud whose repr fails"
    assert notes(first)[1:] in ([], [f"pykern: stage 1, microbatch 0, action 1F0, device 1 {note}"])


@pytest.mark.parametrize("warm", [False, True])
def test_a_stage_that_raises_stop_iteration_does_not_end_the_loop(warm: bool) -> None:
    error = StopIteration("planted")
    layer = Raises(error, 1.0)
    with pykern.Pipeline([nn.Identity(), layer], devices="cpu:2", microbatches=1) as pipe:
        if warm:
            pipe(-BATCH)
        with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
            list(pipe.stream(numbered(4)))
        assert caught.value.__cause__ is error
        assert notes(caught.value) == notes(error)
        assert notes(error)[0] == "pykern: raised in batch 1 of the stream"
        with pytest.raises(StopIteration) as alone:
            pipe(torch.ones(1, 2))
        assert alone.value is error


@pytest.mark.parametrize("error", [ValueError(1), SystemExit(1), asyncio.CancelledError()])
@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_the_outputs_come_before_what_the_batches_raise(error: BaseException, count: int) -> None:
    def batches() -> Iterator[Tensor]:
        yield from numbered(count)
        raise error

    with pipeline([nn.Identity(), nn.Identity()]) as pipe:
        outputs: list[Tensor] = []
        with pytest.raises(type(error)) as caught:
            outputs.extend(pipe.stream(batches()))
        assert caught.value is error
        assert [int(output[0, 0]) for output in outputs] == list(range(count))


def test_an_output_is_taken_by_one_at_a_time() -> None:
    """A stage asks for the next output of the stream that it runs for."""

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] == 1:
                next(streams[0])
            return x

    streams: list[Any] = []
    with pipeline([Asks(), nn.Identity()]) as pipe:
        streams.append(pipe.stream(numbered(3)))
        with pytest.raises(
            ValueError,
            match="outputs of a stream must be taken by one thread at a time, got a call while "
            "another takes one",
        ):
            list(streams[0])
        assert next(pipe.stream(numbered(1)))[0, 0] == 0


def test_an_exception_with_notes_can_be_pickled() -> None:
    layers = [nn.Identity(), Raises(ValueError("planted"))]
    with (
        pykern.Pipeline(layers, devices="cpu:2", microbatches=1) as pipe,
        pytest.raises(ValueError, match="planted") as caught,
    ):
        pipe(BATCH)
    assert notes(pickle.loads(pickle.dumps(caught.value))) == notes(caught.value) != []
