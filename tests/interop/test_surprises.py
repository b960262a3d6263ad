"""Where torch 2.13 gives a wrong or surprising result: what happens here, and what happens there.

Torch's behaviour is asserted for 2.13 only, where it was found.
"""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.utils.checkpoint import checkpoint

from pykern.interop import pipelining
from tests.interop.cases import (
    CPU,
    OURS,
    TORCH,
    WIDTH,
    Library,
    batch,
    close,
    gradients_of,
    loss_fn,
    make,
    parts,
)

pytestmark = pytest.mark.usefixtures("_group_of_one")

IS_2_13 = torch.__version__.startswith("2.13.")


def plain(modules: list[nn.Module], x: Tensor, y: Tensor) -> list[Tensor | None]:
    """Gradients of a mean loss over the whole batch."""
    copied = nn.ModuleList(deepcopy(modules))
    value = x
    for module in copied:
        value = module(value)
    loss_fn(value, y).backward()
    return gradients_of(list(copied))


def read(order: dict[int, Any]) -> list[list[str]]:
    return [[str(action) for action in row if action is not None] for row in order.values()]


def test_the_order_of_1f1b_lists_every_microbatch_of_the_last_rank() -> None:
    stages = [pipelining.PipelineStage(part, i, 4, CPU) for i, part in enumerate(parts(4))]
    ours = pipelining.Schedule1F1B(stages, 4).pipeline_order
    assert read(ours)[3] == ["3F0", "3B0", "3F1", "3B1", "3F2", "3B2", "3F3", "3B3"]
    assert ours[3][:4] == [None, None, None, ours[3][3]]
    if IS_2_13:
        stage: Any = SimpleNamespace(num_stages=4)
        theirs = torch_schedules.Schedule1F1B(stage, 4).pipeline_order
        assert theirs is not None
        assert "3F0" not in read(theirs)[3]
        assert read(ours)[:3] == [row[:-1] for row in read(theirs)[:3]]
        assert [row[-1] for row in read(theirs)] == [f"{rank}REDUCE_GRAD" for rank in range(4)]


def test_a_frozen_first_stage_leaves_the_others_their_gradients() -> None:
    x, y = batch()
    modules = parts(2)
    modules[0].requires_grad_(False)
    expected = plain(modules, x, y)
    ours, theirs = deepcopy(modules), deepcopy(modules)
    make(OURS, "InterleavedZeroBubble", ours).step(x, target=y)
    close(gradients_of(ours), expected)
    if IS_2_13:
        make(TORCH, "InterleavedZeroBubble", theirs).step(x, target=y)
        assert all(gradient is None for gradient in gradients_of(theirs))


def runtime(library: Library, modules: list[nn.Module], count: int) -> Any:
    """The runtime of a plan that is yet to come."""
    names = torch_schedules if library is TORCH else library.names
    stages = [
        library.names.PipelineStage(module, index, len(modules), CPU)
        for index, module in enumerate(modules)
    ]
    return names._PipelineScheduleRuntime(stages, count, loss_fn=loss_fn)


def test_a_plan_may_run_microbatches_out_of_order(tmp_path: Path) -> None:
    x, y = batch()
    file = tmp_path / "plan.csv"
    file.write_text("0F0,0F1,1F1,1B1,1F0,1B0,0B1,0B0\n")
    modules = parts(2)
    schedule = runtime(OURS, modules, 2)
    schedule._load_csv(str(file))
    expected = plain(modules, x, y)
    losses: list[Tensor] = []
    output = schedule.step(x, target=y, losses=losses)
    close(gradients_of(modules), expected)
    close(output, nn.Sequential(*modules)(x).detach())
    close(losses, [loss_fn(output[:4], y[:4]), loss_fn(output[4:], y[4:])])
    if IS_2_13:
        schedule = runtime(TORCH, parts(2), 2)
        schedule._load_csv(str(file))
        with pytest.raises(RuntimeError, match="Loss for microbatch 1 is not available"):
            schedule.step(x, target=y)


def test_gradients_from_before_are_not_scaled() -> None:
    x, y = batch()
    expected = plain(parts(2), x, y)
    times = {}
    for library in (OURS, TORCH):
        modules = parts(2)
        schedule = make(library, "Interleaved1F1B", modules, count=2)
        schedule.step(x, target=y)
        schedule.step(x, target=y)
        first, one = gradients_of(modules)[0], expected[0]
        assert first is not None
        assert one is not None
        times[library.names.__name__] = (first / one).mean().item()
    ours, theirs = times.values()
    assert ours == pytest.approx(2.0)
    if IS_2_13:
        assert theirs == pytest.approx(1.5)


class Checkpointed(nn.Module):
    """A chain of layers that is recomputed, and counts how often it is called."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(num_layers)))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self._forward, x, use_reentrant=False)

    def _forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.layers(x)


def test_checkpointed_layers_are_recomputed_once() -> None:
    x, y = batch()
    calls = {}
    for library in (OURS, TORCH):
        module = Checkpointed(num_layers=4)
        schedule = make(library, "InterleavedZeroBubble", [*parts(1), module], count=2)
        schedule.step(x, target=y)
        module.calls = 0
        schedule.step(x, target=y)
        calls[library.names.__name__] = module.calls
    ours, theirs = calls.values()
    assert ours == 2 * 2
    if IS_2_13:
        # Forward, input gradients, and the weight gradients of each layer.
        assert theirs == 2 * (1 + 1 + 4)


@pytest.mark.parametrize("num_rows", [4, 9, 16])
def test_a_step_sees_the_rows_of_its_own_batch_only(num_rows: int) -> None:
    # torch receives a smaller batch into the buffers of the first, if stages are in two processes.
    modules = parts(2)
    schedule = make(OURS, "1F1B", modules, count=2, scale_grads=False)
    x, y = batch(8)
    schedule.step(x, target=y)
    x, y = batch(num_rows)
    for module in modules:
        module.zero_grad()
    losses: list[Tensor] = []
    output = schedule.step(x, target=y, losses=losses)
    close(output, nn.Sequential(*modules)(x).detach())
    cut = -(-num_rows // 2)
    close(losses, [loss_fn(output[:cut], y[:cut]), loss_fn(output[cut:], y[cut:])])


def test_statistics_count_each_microbatch_once() -> None:
    x, y = batch()
    tracked = {}
    for library in (OURS, TORCH):
        norm = nn.BatchNorm1d(WIDTH).double()
        make(library, "Interleaved1F1B", [*parts(1), norm], count=2).step(x, target=y)
        assert norm.num_batches_tracked is not None
        tracked[library.names.__name__] = int(norm.num_batches_tracked)
    ours, theirs = tracked.values()
    assert ours == 2
    if IS_2_13:
        assert theirs == 3


def test_without_a_plan_a_step_says_so() -> None:
    x, y = batch()
    with pytest.raises(RuntimeError, match="has no plan yet"):
        runtime(OURS, parts(2), 2).step(x, target=y)
    if IS_2_13:
        with pytest.raises(AttributeError, match="pipeline_order_with_comms"):
            runtime(TORCH, parts(2), 2).step(x, target=y)


def test_neighbours_in_one_process_can_be_evaluated() -> None:
    x, _ = batch()
    modules = parts(2)
    close(make(OURS, "LoopedBFS", modules).eval(x), nn.Sequential(*modules)(x).detach())
    if IS_2_13:
        for module in modules:
            module.requires_grad_(False)
        with (
            torch.no_grad(),
            pytest.raises(AssertionError, match="have backward"),
        ):
            make(TORCH, "LoopedBFS", modules, loss_fn=None).step(x)


def test_hooks_of_parameters_fire_where_backward_is_split() -> None:
    x, y = batch()
    calls = {}
    for library in (OURS, TORCH):
        modules = parts(2)
        seen: list[Tensor] = []
        weight = next(modules[1].parameters())
        weight.register_post_accumulate_grad_hook(seen.append)
        make(library, "InterleavedZeroBubble", modules, count=2).step(x, target=y)
        calls[library.names.__name__] = len(seen)
    ours, theirs = calls.values()
    assert ours == 2
    if IS_2_13:
        assert theirs == 0


@pytest.mark.nightly
# Compiling reads `.grad` of whatever it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_modules_run_where_backward_is_split() -> None:
    x, y = batch()
    modules = parts(2)
    expected = plain(modules, x, y)
    compiled: list[Any] = [torch.compile(module, backend="aot_eager") for module in modules]
    make(OURS, "InterleavedZeroBubble", compiled).step(x, target=y)
    close(gradients_of(modules), expected)
    if IS_2_13:
        with pytest.raises(RuntimeError, match="not supported with stage modules that have used"):
            make(TORCH, "InterleavedZeroBubble", compiled)
