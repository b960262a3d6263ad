"""Runs whose state is shared out: saved, resumed by other numbers of processes, scaled, failing."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import pykern
from pykern import ZeroOptimizer, checkpoint
from pykern.checkpoint import CheckpointError
from pykern.checkpoint.dcp import to_dcp
from tests import peers
from tests.parallel.data_runs import NUM_MICROBATCHES, pipeline
from tests.parallel.reference import Reference, batch_of, layers

ROWS = 6
ADAM: Any = (torch.optim.AdamW, 0.01, {})
SGD: Any = (torch.optim.SGD, 0.1, {"momentum": 0.9})
# From the seventh step on, batches are those of as many processes as there are then.
HALF = 6


def run(
    rank: int, path: Path, kind: Any, first: int, last: int, schedule: str = "one_f_one_b"
) -> tuple[list[Tensor], float]:
    """Some steps, from a file if they are not the first, into a file."""
    with pipeline(schedule=schedule) as pipe:
        optimizer_class, lr, options = kind
        optimizer = ZeroOptimizer(pipe, optimizer_class, lr=5.0 if first else lr, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if first:
            assert checkpoint.load(path, pipe, optimizer, scheduler=scheduler) == first
            # As it was, and shared out.
            own = sum(each.numel() for each in optimizer._owned)
            kept = [
                value.numel()
                for entries in optimizer.state.values()
                for name, value in entries.items()
                if name in ("exp_avg", "momentum_buffer")
            ]
            assert sum(kept) == own < sum(each.numel() for each in pipe.parameters())
        for number in range(first, last):
            x, y = batch_of(number, rank, ROWS)
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        checkpoint.save(path, pipe, optimizer, scheduler=scheduler, extra=last)
        return [parameter.detach() for parameter in pipe.parameters()], float(
            scheduler.get_last_lr()[0]
        )


def one_process(path: Path | None, kind: Any, first: int, last: int, num_peers: int) -> Any:
    """The same by the plain model and optimizer, fed with what all processes get."""
    model = nn.Sequential(*layers())
    optimizer_class, lr, options = kind
    optimizer = optimizer_class(model.parameters(), lr=lr, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if path is not None:
        assert checkpoint.load(path, model, optimizer, scheduler=scheduler) == first
    reference = Reference(model, NUM_MICROBATCHES, nn.functional.mse_loss)
    for number in range(first, last):
        reference.step([batch_of(number, rank, ROWS) for rank in range(num_peers)])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [parameter.detach() for parameter in model.parameters()], float(
        scheduler.get_last_lr()[0]
    )


@pytest.mark.parametrize(
    ("before", "after", "kind"), [(2, 2, ADAM), (2, 4, SGD), (4, 2, ADAM), (2, 1, ADAM)]
)
def test_a_run_goes_on_with_another_number_of_processes(
    tmp_path: Path, before: int, after: int, kind: Any
) -> None:
    path = tmp_path / "run.pykern"
    ends = peers.run(before, run, path, kind, 0, HALF)
    (saved,) = tmp_path.iterdir()
    assert saved == path
    wanted, rate = one_process(path, kind, HALF, 10, after)
    alone = [resume_alone(path)] if after == 1 else None
    found = alone or peers.run(after, run, path, kind, HALF, 10, "gpipe")
    for parameters, its_rate in found:
        assert its_rate == rate
        if after < 4:
            assert all(map(torch.equal, parameters, wanted))
        else:
            assert all(map(torch.equal, parameters, found[0][0]))
            # Each gradient, here below one, is off by at most three roundings of a sum of four;
            # four steps of this rate and momentum add these up to less than themselves, and what
            # comes of it in later gradients is less than ten times as much.
            bound = 10 * 3 * 2**-24
            for value, other in zip(parameters, wanted, strict=True):
                assert (value - other).abs().max() <= bound
    if before == 2:
        assert all(map(torch.equal, ends[0][0], one_process(None, kind, 0, HALF, before)[0]))


def resume_alone(path: Path) -> Any:
    with pipeline(process_group=None) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        first = checkpoint.load(path, pipe, optimizer, scheduler=scheduler)
        for number in range(first, 10):
            x, y = batch_of(number, 0, ROWS)
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return [parameter.detach() for parameter in pipe.parameters()], float(
            scheduler.get_last_lr()[0]
        )


def save_nowhere(rank: int, folder: Path) -> list[str]:
    """Both hear of it, and can go on."""
    said = []
    with pipeline() as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        for path, options in (
            (folder / "missing" / "run", {}),
            (folder / "run", {"extra": object()}),
            (folder / "run", {"grads": True}),
        ):
            with pytest.raises((CheckpointError, OSError)) as caught:
                checkpoint.save(path, pipe, optimizer, **options)
            said.append(f"{type(caught.value).__name__}: {caught.value}")
        assert list(folder.iterdir()) == []
        dist.barrier()
        checkpoint.save(folder / "run", pipe, optimizer)
        dist.barrier()
        assert [path.name for path in folder.iterdir()] == ["run"]
        return said


def test_a_file_that_cannot_be_written_is_told_to_all(tmp_path: Path) -> None:
    writer, other = peers.run(2, save_nowhere, tmp_path)
    assert writer[0].startswith("FileNotFoundError")
    assert other[0].startswith("CheckpointError: process 0 has not written the file: FileNotFound")
    assert "extra" in writer[1]
    assert writer[1] in other[1]
    assert writer[2] == other[2]
    assert "the gradients of its own parameters alone, got True. Save after an update" in writer[2]


def scaled(rank: int) -> tuple[list[float], list[Tensor]]:
    """Values that are not finite are in the batch of one process, then in the gradients that one
    owns."""
    with pipeline() as pipe:
        plain = torch.amp.GradScaler("cpu")
        optimizer = ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1)
        x, y = batch_of(0, rank, 8)
        with pytest.raises(
            TypeError,
            match=r"scaler must be a ShardedGradScaler of torch.distributed.fsdp with a "
            r"ZeroOptimizer, got a .*, which would look for infinite values in one process "
            r"alone",
        ):
            pipe.step(x, target=y, scaler=plain)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        scales = []
        for number in range(4):
            x, y = batch_of(number, rank, 8)
            if number == 1 and rank == 1:
                x[0, 0] = torch.inf
            pipe.step(x, target=y, scaler=scaler)
            if number == 2 and rank == 0:
                gradient = optimizer._owned[0].grad
                assert gradient is not None
                gradient[0] = torch.nan
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, [parameter.detach() for parameter in pipe.parameters()]


def test_a_scaler_over_all_processes() -> None:
    model = nn.Sequential(*layers())
    reference = Reference(model, NUM_MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in (0, 3):
        reference.step([batch_of(number, rank, 8) for rank in range(2)])
        optimizer.step()
        optimizer.zero_grad()
    for scales, parameters in peers.run(2, scaled):
        assert scales == [2.0**10, 2.0**9, 2.0**8, 2.0**8]
        assert all(map(torch.equal, parameters, model.parameters()))


def in_part_of_the_processes(rank: int) -> list[float]:
    """Two of three processes train; by default torch's scaler would wait for the third."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return []
    with pipeline(process_group=group) as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1)
        x, y = batch_of(0, rank, 8)
        with pytest.raises(ValueError, match=r"got one that waits for processes \[0, 1, 2\]"):
            pipe.step(x, target=y, scaler=ShardedGradScaler("cpu"))
        pipe.step(x, target=y, scaler=ShardedGradScaler("cpu", enabled=False))
        optimizer.zero_grad()
        if rank == 0:
            x[0, 0] = torch.inf
        scaler = ShardedGradScaler("cpu", init_scale=2.0**10, process_group=group)
        pipe.step(x, target=y, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        return [scaler.get_scale()]


def test_a_scaler_over_the_processes_of_the_pipeline() -> None:
    assert peers.run(3, in_part_of_the_processes) == [[2.0**9], [], [2.0**9]]


def fail_once(rank: int) -> list[Tensor]:
    """One process's stage fails; all hear of it, and the next steps are right."""
    fails = False

    def stop(module: nn.Module, arguments: Any) -> None:
        if fails and rank == 1:
            raise ValueError("planted")

    blocks = layers()
    blocks[2].register_forward_pre_hook(stop)
    with pipeline(nn.Sequential(*blocks)) as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        for number in range(4):
            x, y = batch_of(number, rank, 8)
            fails = number == 2
            if fails:
                kind = ValueError if rank == 1 else pykern.PeerError
                with pytest.raises(kind, match="planted"):
                    pipe.step(x, target=y)
            else:
                pipe.step(x, target=y)
                optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in pipe.parameters()]


def test_a_step_that_fails_in_one_process_is_followed_by_right_ones() -> None:
    model = nn.Sequential(*layers())
    reference = Reference(model, NUM_MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in (0, 1, 3):
        reference.step([batch_of(number, rank, 8) for rank in range(2)])
        optimizer.step()
        optimizer.zero_grad()
    for parameters in peers.run(2, fail_once):
        assert all(map(torch.equal, parameters, model.parameters()))


def few_parameters(rank: int) -> list[Tensor]:
    """More processes than parameters: some own nothing."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    with pipeline(model) as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        for number in range(2):
            x, y = batch_of(number, rank, 8)
            pipe.step(x * (rank < 2), target=y)
            optimizer.clip_grad_norm_(0.01)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in pipe.parameters()]


def test_more_processes_than_parameters() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    reference = Reference(model, NUM_MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(2):
        batches = [batch_of(number, rank, 8) for rank in range(3)]
        # Zeros give gradients of zero: what is added to the two others, in any order.
        batches[2] = torch.zeros_like(batches[2][0]), batches[2][1]
        reference.step(batches)
        pykern.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    for parameters in peers.run(3, few_parameters):
        assert all(map(torch.equal, parameters, model.parameters()))


def refused(rank: int) -> None:
    with pipeline() as pipe:
        for stage, reason in (
            (2, "until a stage's last backward"),
            (3, "gather the stage's"),
            (4, "1, 2 and 3"),
        ):
            with pytest.raises(ValueError, match=f"stage must be 1, got {stage}: .*{reason}"):
                ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1, stage=stage)
        with pytest.raises(
            TypeError,
            match="optimizer_class must step parameters one by one, got LBFGS, which looks at all "
            "at once",
        ):
            ZeroOptimizer(pipe, torch.optim.LBFGS)
        for given, message in (
            (torch.optim.SGD(pipe.parameters()), "a class of optimizers, got an object of SGD"),
            (partial(torch.optim.SGD, lr=0.1), "a class, .* got a partial"),
        ):
            with pytest.raises(TypeError, match=f"optimizer_class must be {message}"):
                ZeroOptimizer(pipe, given)  # type: ignore[arg-type]
        model: Any = nn.Linear(2, 2)
        with pytest.raises(TypeError, match="pipe must be a Pipeline, got a Linear"):
            ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="parameters must be the pipeline's, got one of shape"):
            ZeroOptimizer(pipe, torch.optim.SGD, model.parameters(), lr=0.1)
        with pytest.raises(CheckpointError, match="optimizer must have its state in each process"):
            to_dcp("never", pipe, ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1))
        first = next(iter(pipe.parameters()))
        first.data = first.data.t()
        with pytest.raises(
            ValueError,
            match=r"parameters must be contiguous to be sent between processes, got shape \(6, 6\) "
            r"and strides \(1, 6\)",
        ):
            ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1)
        first.data = first.data.contiguous().double()
        with pytest.raises(
            TypeError, match=r"must have one type .*got torch.float32, torch.float64"
        ):
            ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1)
    with (
        pipeline(process_group=None) as pipe,
        pytest.raises(ValueError, match="the pipeline must have a process_group"),
    ):
        ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1)


def test_what_cannot_be_shared_out_is_refused() -> None:
    peers.run(1, refused)
