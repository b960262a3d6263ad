"""Scripts that run once per rank: threads that take turns, and whose steps are one."""

import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern.interop import pipelining
from pykern.interop.pipelining import ranks
from tests.interop.cases import (
    CPU,
    OURS,
    V_SHAPED,
    Outcome,
    batch,
    expect_same,
    loss_fn,
    parts,
    step,
)


def train(name: str, num_stages: int) -> tuple[Any, list[Tensor], dict[int, list[Tensor | None]]]:
    """One rank's part of a step."""
    rank, size = ranks.get_rank(), ranks.get_world_size()
    v_shaped = name in V_SHAPED
    local = [rank, num_stages - 1 - rank] if v_shaped else range(rank, num_stages, size)
    model = parts(num_stages)
    stages = [pipelining.PipelineStage(model[i], i, num_stages, CPU) for i in local]
    schedule = pipelining.get_schedule_class(name)(
        stages if len(stages) > 1 else stages[0], 4, loss_fn=loss_fn
    )
    x, y = batch()
    losses: list[Tensor] = []
    has_last = num_stages - 1 in local
    output = schedule.step(
        *((x,) if rank == 0 else ()),
        target=y if has_last else None,
        losses=losses if has_last else None,
    )
    gradients = {i: [parameter.grad for parameter in model[i].parameters()] for i in local}
    return output, losses, gradients


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        ("GPipe", 3),
        ("1F1B", 3),
        ("Interleaved1F1B", 4),
        ("LoopedBFS", 4),
        ("ZBVZeroBubble", 4),
        ("DualPipeV", 4),
    ],
)
def test_each_rank_gets_its_part(name: str, num_stages: int) -> None:
    nproc = num_stages if name in ("GPipe", "1F1B") else 2
    found = pipelining.run(train, nproc, name, num_stages)
    gradients = {index: grads for _, _, local in found for index, grads in local.items()}
    (last,) = (rank for rank, (_, losses, _) in enumerate(found) if losses)
    assert last == (0 if name in V_SHAPED else nproc - 1)
    assert [output is None for output, _, _ in found] == [rank != last for rank in range(nproc)]
    output, losses, _ = found[last]
    ours = Outcome(output, losses, [grad for i in sorted(gradients) for grad in gradients[i]])
    x, y = batch()
    expect_same(ours, step(OURS, name, parts(num_stages), x, target=y))


def test_ranks_take_turns() -> None:
    seen: list[tuple[int, str]] = []

    def main() -> int:
        rank = ranks.get_rank()
        for place in ("before", "between", "after"):
            seen.append((rank, place))
            ranks.barrier()
        return rank

    assert pipelining.run(main, 3) == [0, 1, 2]
    assert seen == [(r, place) for place in ("before", "between", "after") for r in range(3)]


def test_each_rank_has_random_numbers_of_its_own() -> None:
    def main() -> list[float]:
        torch.manual_seed(5)
        drawn = [torch.rand(()).item()]
        ranks.barrier()
        return [*drawn, torch.rand(()).item()]

    torch.manual_seed(5)
    alone = [torch.rand(()).item(), torch.rand(()).item()]
    assert pipelining.run(main, 3) == [alone] * 3


def test_without_seeds_ranks_begin_as_the_caller_is() -> None:
    state = torch.get_rng_state()
    first = torch.rand(())
    torch.set_rng_state(state)
    assert pipelining.run(lambda: torch.rand(()), 2) == [first, first]


def test_each_rank_finds_the_generators_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn gave back the state of the current GPU alone, and a rank began with its number 0."""
    gpus = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)

    def main() -> list[float]:
        drawn = [torch.rand((), generator=gpu).item() for gpu in gpus]
        ranks.barrier()
        return [*drawn, *(torch.rand((), generator=gpu).item() for gpu in gpus)]

    first, second = pipelining.run(main, 2)
    assert first == second


def test_outside_there_is_one_rank() -> None:
    ranks.init_process_group("gloo", init_method="env://")
    assert ranks.is_initialized()
    assert (ranks.get_rank(), ranks.get_world_size()) == (0, 1)
    ranks.barrier()
    ranks.destroy_process_group()


def test_what_a_stage_raises_reaches_every_rank_and_the_next_step_is_right() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fails = parts(1)[0], True

        def forward(self, x: Tensor) -> Any:
            if self.fails:
                raise ZeroDivisionError("on purpose")
            return self.inner(x)

    def main() -> tuple[BaseException, Any]:
        rank = ranks.get_rank()
        module = Fails() if rank == 1 else parts(1)[0]
        stage = pipelining.PipelineStage(module, rank, 2, CPU)
        schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=loss_fn)
        x, y = batch()
        with pytest.raises(ZeroDivisionError) as caught:
            schedule.step(x, target=y)
        module.fails = False  # type: ignore[assignment]
        return caught.value, schedule.step(x, target=y)

    (first, nothing), (second, output) = pipelining.run(main, 2)
    assert first is second
    assert any("stage 1, microbatch 0" in note for note in first.__notes__)
    assert nothing is None
    assert output.shape == (8, 6)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_ends_all(rank: int) -> None:
    def main() -> None:
        if ranks.get_rank() == rank:
            raise ZeroDivisionError("on purpose")
        ranks.barrier()

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        pipelining.run(main, 2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_rank_that_returns_early_is_missed() -> None:
    def main() -> None:
        if ranks.get_rank() == 1:
            ranks.barrier()

    with pytest.raises(RuntimeError, match="rank 1 waits for all others, but rank 0 has returned"):
        pipelining.run(main, 2)


def test_an_interrupt_while_others_have_the_turn_ends_all() -> None:
    seen = []

    def main() -> None:
        ranks.barrier()
        if ranks.get_rank() == 0:
            signal.raise_signal(signal.SIGINT)
        ranks.barrier()
        seen.append(ranks.get_rank())

    with pytest.raises(KeyboardInterrupt):
        pipelining.run(main, 3)
    assert seen == []


def test_ranks_that_meet_in_different_places_are_told() -> None:
    def main() -> None:
        rank = ranks.get_rank()
        stage = pipelining.PipelineStage(parts(1)[0], rank, 2, CPU)
        schedule = pipelining.ScheduleGPipe(stage, 2)
        if rank == 0:
            schedule.step(batch()[0])
        else:
            ranks.barrier()

    with pytest.raises(
        RuntimeError,
        match="got some in a barrier",
    ):
        pipelining.run(main, 2)


@pytest.mark.parametrize(
    ("of_rank", "text"),
    [
        (
            lambda rank: {"n_microbatches": 2 + rank},
            "all ranks must run the same plan in the same way, got",
        ),
        (
            lambda rank: {"loss_fn": loss_fn if rank else None},
            "all ranks must run the same plan in the same way, got",
        ),
    ],
)
def test_ranks_that_disagree_are_told(of_rank: Any, text: str) -> None:
    def main() -> None:
        rank = ranks.get_rank()
        stage = pipelining.PipelineStage(parts(1)[0], rank, 2, CPU)
        options = {"n_microbatches": 2, "loss_fn": loss_fn} | of_rank(rank)
        x, y = batch()
        pipelining.ScheduleGPipe(stage, **options).step(x, target=y)

    with pytest.raises(RuntimeError, match=text):
        pipelining.run(main, 2)


def test_a_rank_needs_the_stages_of_its_own() -> None:
    def main() -> None:
        stage = pipelining.PipelineStage(parts(1)[0], 1 - ranks.get_rank(), 2, CPU)
        pipelining.ScheduleGPipe(stage, 2)

    with pytest.raises(ValueError, match=r"stages must be \[0\] in rank 0 of 2 .* got \[1\]"):
        pipelining.run(main, 2)


def test_more_ranks_than_stages() -> None:
    with pytest.raises(RuntimeError, match="ranks must be at most 2, the number of stages, got 3"):
        pipelining.run(lambda: pipelining.PipelineStage(parts(1)[0], 0, 2, CPU), 3)


def test_ranks_have_no_ranks() -> None:
    with pytest.raises(
        RuntimeError, match="run must be called outside of ranks, got a call by rank"
    ):
        pipelining.run(lambda: pipelining.run(print, 2), 2)
    with pytest.raises(ValueError, match="at least 1"):
        pipelining.run(print, 0)
