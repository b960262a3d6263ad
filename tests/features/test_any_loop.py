"""Any loop: the second half of the table of features, a test for each row."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from typer.testing import CliRunner

import pykern
from pykern import _C, checkpoint, schedules
from pykern.cli import app
from pykern.plan import Costs, bubbles, check, load_plan, save_plan, simulate
from pykern.plan.drawing.chrome_trace import save_chrome_trace
from pykern.plan.drawing.svg import as_svg
from pykern.search import search
from pykern.tensors.dtensor import whole
from tests import peers
from tests.features.plain import (
    NUM_MICROBATCHES,
    assert_trains_alike,
    chain,
    pipeline,
    plain_step,
)
from tests.features.table import row
from tests.support.comparison import assert_same_gradients

X, Y = torch.randn(8, 8), torch.randn(8, 8)


@row("The caller's autocast is respected", "y n n own n own")
def test_autocast() -> None:
    model = chain()
    plain = copy.deepcopy(model)
    with pipeline(model) as pipe, torch.autocast("cpu", torch.bfloat16):
        assert pipe(X).dtype == torch.bfloat16
        assert torch.equal(pipe.step(X, target=Y), plain_step(plain, F.mse_loss, [X], Y))
        assert_same_gradients(pipe, plain)


@row("GradScaler", "n y own own p own")
def test_grad_scaler() -> None:
    model = chain()
    plain = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipeline(model) as pipe:
        loss = pipe.step(X, target=Y, scaler=scaler)
        assert torch.equal(loss, plain_step(plain, F.mse_loss, [X], Y))
        scaler.unscale_(optimizer)
        assert_same_gradients(pipe, plain)
        scaler.step(optimizer)
        scaler.update()


@row("bfloat16 and float8", "user user bf16 y user bf16")
def test_bfloat16_and_float8() -> None:
    class Float8(nn.Linear):
        """Its product is of weights rounded to float8, with gradients as if they were not."""

        def forward(self, x: Tensor) -> Tensor:
            rounded = self.weight.detach().to(torch.float8_e4m3fn).to(x.dtype)
            return F.linear(x, self.weight + (rounded - self.weight.detach()), self.bias)

    half = chain().to(torch.bfloat16)
    assert_trains_alike(half, [X.bfloat16()], Y.bfloat16(), F.mse_loss)
    assert_trains_alike([Float8(8, 8), Float8(8, 8)], [X], Y, F.mse_loss)


@row("Gradients accumulate over steps", "p y own y y y")
def test_gradient_accumulation() -> None:
    model = chain()
    plain = copy.deepcopy(model)
    with pipeline(model) as pipe:
        for _ in range(3):
            pipe.step(X, target=Y)
            plain_step(plain, F.mse_loss, [X], Y)
            assert_same_gradients(pipe, plain)


@row("Clipping by the global norm", "titan y y y n y")
def test_clipping_by_the_global_norm() -> None:
    norms = []
    for devices in ("cpu:1", "cpu:2", "cpu:4"):
        torch.manual_seed(5)
        model = chain()
        plain = copy.deepcopy(model)
        with pipeline(model, devices=devices) as pipe:
            pipe.step(X, target=Y)
            plain_step(plain, F.mse_loss, [X], Y)
            norms.append(pykern.clip_grad_norm_(pipe.parameters(), 0.01))
            theirs = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        torch.testing.assert_close(norms[-1], theirs)
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[0], norms[2])


def train(devices: str, num_steps: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(5)
    model = chain()
    with pipeline(model, devices=devices, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for _ in range(num_steps):
            optimizer.zero_grad()
            pipe.step(X, target=Y)
            optimizer.step()
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (num_steps // 2)
    return list(model.parameters())


@row("One optimizer over all stages", "n y own own n own")
def test_one_optimizer_over_all_stages() -> None:
    for one, other in zip(train("cpu:1", 4), train("cpu:4", 4), strict=True):
        assert torch.equal(one, other)


@row("Optimizer on the host", "titan n ? y n ?")
def test_optimizer_on_the_host() -> None:
    model = chain()
    plain = copy.deepcopy(model)
    with pipeline(model) as pipe:
        ours = pykern.HostOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for _ in range(3):
            pipe.step(X, target=Y)
            plain_step(plain, F.mse_loss, [X], Y)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert all(map(torch.equal, pipe.parameters(), plain.parameters()))


def one_of_two(rank: int) -> tuple[int, list[Tensor]]:
    torch.manual_seed(5)
    with pipeline(chain(), process_group=dist.group.WORLD) as pipe:
        optimizer = pykern.ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        for _ in range(3):
            half = slice(4 * rank, 4 * rank + 4)
            pipe.step(X[half], target=Y[half])
            optimizer.step()
            optimizer.zero_grad()
        return len(optimizer.state), [parameter.detach() for parameter in pipe.parameters()]


@row("ZeRO-1 over data-parallel processes", "titan ? y y n ?")
def test_zero_1_over_data_parallel_processes() -> None:
    (held, first), (held_too, second) = peers.run(2, one_of_two)
    assert held + held_too == len(first)
    assert all(map(torch.equal, first, second))


@row("Learning-rate schedulers, a plain loop", "y y own own y own")
def test_learning_rate_schedulers() -> None:
    trained = train("cpu:2", 6, schedule="zb_h1")
    assert all(map(torch.equal, trained, train("cpu:2", 6)))


@row("The original names in `state_dict`", "y n n p user p")
def test_original_names() -> None:
    model = chain()
    with pipeline(model, devices="cpu:4") as pipe:
        assert list(pipe.state_dict()) == list(chain().state_dict())
        model.load_state_dict(pipe.state_dict())


@row("Resume with another number of stages", "p n p y n p")
def test_resume_with_another_number_of_stages(tmp_path: Path) -> None:
    def run(devices: str, schedule: str, *, saves: bool, loads: bool) -> list[Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)) for _ in range(4)))
        with pipeline(model, devices=devices, schedule=schedule) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
            if loads:
                assert checkpoint.load(tmp_path / "run", pipe, optimizer) == {"step": 2}
            for step in range(2 if loads else 0, 4):
                if saves and step == 2:
                    checkpoint.save(tmp_path / "run", pipe, optimizer, extra={"step": step})
                x = torch.randn(8, 8)
                optimizer.zero_grad()
                pipe.step(x, target=x)
                optimizer.step()
        return list(model.parameters())

    whole = run("cpu:4", "one_f_one_b", saves=True, loads=False)
    for devices, schedule in (("cpu:1", "gpipe"), ("cpu:2", "interleaved"), ("cpu:3", "zb_h1")):
        again = run(devices, schedule, saves=False, loads=True)
        assert all(map(torch.equal, whole, again)), devices


@row("Evaluation, forward only, streamed", "y y y y y y")
def test_evaluation() -> None:
    model = chain()
    with pipeline(model) as pipe:
        pipe.eval()
        batches = [torch.randn(rows, 8) for rows in (8, 3, 5)]
        outputs = list(pipe.stream(batches))
        for batch, output in zip(batches, outputs, strict=True):
            torch.testing.assert_close(output, model(batch))
            assert torch.equal(output, pipe(batch))
            assert not output.requires_grad


@row("Schedules", "7+CSV 1 1 2+VPP 2 8+")
def test_schedules() -> None:
    assert len(schedules.by_name) == 19
    for name in ("gpipe", "interleaved", "hanayo", "chimera", "zb_v", "v_half"):
        if name != "chimera":  # whose second replica's sums are added later
            assert_trains_alike(chain(8), [X], Y, F.mse_loss, schedule=name)


@row("Replicas side by side in one process, sums in a fixed order", "n n n n n n")
def test_replicas_side_by_side_in_one_process() -> None:
    model = chain()
    plain = copy.deepcopy(model)
    with pipeline(model, devices="cpu:4", replicas=2, schedule="hanayo") as pipe:
        loss = pipe.step(X, target=Y)
        names = [name for name, _ in pipe.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    losses, sums = [], []
    for replica in range(2):
        plain.zero_grad()
        for number in range(replica, NUM_MICROBATCHES, 2):
            rows = slice(2 * number, 2 * number + 2)
            part = F.mse_loss(plain(X[rows]), Y[rows]) / NUM_MICROBATCHES
            part.backward()
            losses.append((number, part.detach()))
        sums.append([parameter.grad for parameter in plain.parameters()])
    first, *others = (part for _, part in sorted(losses))
    assert torch.equal(loss, sum(others, first))
    for parameter, one, other in zip(model.parameters(), *sums, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, one + other)


@row("A schedule of your own, as a file", "private n n n n by_function")
def test_a_schedule_as_a_file(tmp_path: Path) -> None:
    plan = schedules.hanayo(2, NUM_MICROBATCHES, waves=2)
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert_trains_alike(chain(8), [X], Y, F.mse_loss, schedule=loaded, microbatches=None)


@row("A plan from measured costs", "n n n n n y")
def test_a_plan_from_measured_costs() -> None:
    with pipeline(chain(4)) as pipe:
        pipe.step(X, target=Y)
        measured = pipe.costs()
    found = search.auto(2, NUM_MICROBATCHES, costs=measured)
    assert simulate(found.plan, measured).makespan_ns <= simulate(pipe.plan, measured).makespan_ns
    assert_trains_alike(chain(4), [X], Y, F.mse_loss, schedule=found.plan, microbatches=None)


@row("Plans are checked and simulated", "p n n n n asserts")
def test_plans_are_checked_and_simulated() -> None:
    plan = schedules.one_f_one_b(4, 8)
    assert simulate(plan, Costs(1.0, 2.0)).bubble_ratio == pytest.approx(3 / 11)
    with pytest.raises(pykern.PlanError, match="P0"):
        check(pykern.Plan(plan.placement, 8, [row[::-1] for row in plan.rows]))


@row("Timeline and pictures", "private n n p n web_demo")
def test_timeline_and_pictures(tmp_path: Path) -> None:
    with pipeline(chain()) as pipe:
        pipe.step(X, target=Y)
        timelines = {"measured": pipe.timeline(), "predicted": pipe.prediction()}
    assert as_svg(timelines).count("<text") > 2 * 4 * NUM_MICROBATCHES
    save_chrome_trace(timelines, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 2 * NUM_MICROBATCHES
    assert len(bubbles(pipe.plan, pipe.costs())) > 0


@row("A profiler's range for each action", "y n timers NVTX n NVTX")
@pytest.mark.skipif(not _C.nvtx_built, reason="built without NVTX's header")
def test_ranges_for_profilers(run: Any) -> None:
    # A tool that is injected in a profiler's place has counted them.
    record, _ = run("one_f_one_b(2, 4)")
    assert len(record.ranges) == 2 * 2 * 4
    assert {(domain, text) for _, domain, _, text, *_ in record.ranges} == {
        ("pykern", f"{kind} s{stage}") for kind in "FB" for stage in range(2)
    }


@row("Numbers that are not finite are found and named", "titan n fp16 y n y")
def test_what_is_not_finite_is_named() -> None:
    x = X.clone()
    x[5, 0] = float("nan")
    with (
        pipeline(chain(), check_finite="activations") as pipe,
        pytest.raises(FloatingPointError, match="microbatch 2"),
    ):
        pipe.step(x, target=Y)


class Fails(nn.Linear):
    error: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(x)


@row("A fault reaches the caller; the next step is right", "n y n n n n")
def test_a_fault_reaches_the_caller() -> None:
    last = Fails(8, 8)
    layers = [nn.Linear(8, 8), last]
    plain = nn.Sequential(*copy.deepcopy(layers))
    with pipeline(layers) as pipe:
        error = last.error = ZeroDivisionError("mine")
        with pytest.raises(ZeroDivisionError) as caught:
            pipe.step(X, target=Y)
        assert caught.value is error
        assert "stage 1, microbatch 0" in caught.value.__notes__[0]
        last.error = None
        pipe.zero_grad()
        assert torch.equal(pipe.step(X, target=Y), plain_step(plain, F.mse_loss, [X], Y))
        assert_same_gradients(pipe, plain)


@row("Tests for equal bits", "p p n y n n")
def test_equal_bits_for_every_schedule() -> None:
    # All models, schedules and counts: tests/runtime/test_transparency.py and tests/zoo.
    for name in ("breadth_first", "zb_h2", "gis"):
        assert_trains_alike(chain(4), [X], Y, F.mse_loss, schedule=name)


@row("Command line, tuner, notebook", "n n p p n p")
def test_command_line_tuner_and_notebook(root: Path) -> None:
    tuned = CliRunner().invoke(app, ["plan", "auto", "-p", "4", "-m", "8", "--memory", "0.75"])
    assert tuned.exit_code == 0
    assert "bubble" in tuned.output
    cells = json.loads((root / "docs/tour.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    threads = torch.get_num_threads()
    try:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    finally:
        torch.set_num_threads(threads)
    assert names["pipe"].timeline().bubble_ratio < 1


def whole_numbers() -> nn.Sequential:
    """A model whose sums are exact, in whichever order."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    return model


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / 2


def sliced_step(_: int, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    styles = {"[02].0": ColwiseParallel(), "[13].0": RowwiseParallel()}
    with pipeline(whole_numbers(), loss_fn=half_square, tensor_parallel=(mesh, styles)) as pipe:
        loss = pipe.step(x, target=y)
        return loss, {name: whole(one.grad) for name, one in pipe.named_parameters()}  # type: ignore[arg-type]


@pytest.mark.slow
@row("Tensor parallel within stages", "titan n user y n y")
def test_tensor_parallel_within_stages() -> None:
    plain, x, y = whole_numbers(), X.round().double(), Y.round().double()
    loss = plain_step(plain, half_square, [x], y)
    for ours, gradients in peers.run(2, sliced_step, x, y):
        assert torch.equal(ours, loss)
        for name, one in plain.named_parameters():
            assert one.grad is not None
            assert torch.equal(gradients[name], one.grad), name


@row("Installs with pip alone", "in_torch y JIT source source fork")
def test_it_installs_with_pip_alone(root: Path) -> None:
    # That the wheel is built and works: tests/project/test_wheel.py.
    import importlib.metadata  # noqa: PLC0415

    needed = importlib.metadata.requires("pykern-runtime") or []
    always = [name for name in needed if "extra ==" not in name]
    assert sorted(name.split(">")[0] for name in always) == ["rich", "torch", "typer"]
