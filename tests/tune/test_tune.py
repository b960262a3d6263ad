"""`pykern.tune` and `Pipeline(tuned=...)`, with few rounds, whatever is measured in them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import _C
from pykern.search import search
from pykern.tuning import cache, measure, overheads, run, trial, weigh
from pykern.tuning.asked import Asked
from pykern.tuning.held import LEVELS, levels_in
from pykern.tuning.held import held as held_bytes
from pykern.tuning.measurements import Measurements
from pykern.tuning.proposal import Proposal
from pykern.tuning.search import ProposalSearch

from .synthetic import measurements


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(overheads, "_ROUNDS", 2)
    monkeypatch.setattr(trial, "FEWEST", 2)
    monkeypatch.setattr(trial, "MOST", 2)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


class Net(nn.Module):
    """A model with a forward of its own, which calls its norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body[:2]:
            x = x + layer(x)
        x = self.norm(x)
        for layer in self.body[2:]:
            x = x + layer(x)
        return self.norm(x)


def tuned(model: nn.Module, **more: Any) -> pykern.Choice:
    x = torch.ones(4, 8)
    given: dict[str, Any] = {"sample": x, "target": x, "devices": "cpu:2", "loss_fn": F.mse_loss}
    return pykern.tune(model, **(given | more))


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measurements([10.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr(cache, "measure", lambda *_: found)


class Noting(nn.Linear):
    """Notes the intra-op threads that it has."""

    threads: set[int]

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(torch.get_num_threads())
        return super().forward(x)


def test_units_are_measured_with_the_threads_that_workers_have_beside_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [Noting(8, 8) for _ in range(4)]
    Noting.threads = set()
    x = torch.ones(4, 8)
    asked = Asked(nn.Sequential(*layers), x, F.mse_loss, "cpu:2", x)
    # Bytes are counted without a worker.
    monkeypatch.setattr(measure, "held_bytes", partial(held, held_bytes, Noting))
    with _C.Undo(torch.set_num_threads, torch.get_num_threads()):
        torch.set_num_threads(4)
        measure.measure(asked, lambda _: None)
    # One worker alone would have all four.
    assert Noting.threads == {2}


def held(count: Any, noting: type[Noting], *given: Any) -> Any:
    """Counts bytes, without a note of the threads there."""
    found = count(*given)
    noting.threads = set()
    return found


def test_the_choice_is_the_model_again() -> None:
    model = mlp()
    x = torch.randn(8, 8)
    expected = F.mse_loss(model(x), x)
    choice = tuned(model, batch_size=8)
    with choice.pipeline() as pipe:
        torch.testing.assert_close(pipe.step(x, target=x), expected.detach())
    measured = [one.measured_ns for one in choice.proposals if one.measured_ns is not None]
    assert choice.best.measured_ns == measured[0]
    # One with fewer actions comes before another that is as fast: see `trial.ranked`.
    assert measured[0] <= min(measured) * (1 + trial.SAME)


def test_nothing_of_the_model_changes() -> None:
    norm = [nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()]
    model = mlp().append(nn.Sequential(*norm, nn.Dropout(0.1)))
    weight = model.get_parameter("0.0.weight")
    weight.grad = torch.ones(8, 8)
    model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 8)
    numbers = torch.get_rng_state()
    tuned(model, sample=x, target=x, optimizer=torch.optim.AdamW)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(weight.grad, torch.ones(8, 8))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "0.0.weight")
    assert not any(module.training for module in model.modules())


class Averaging(nn.Linear):
    """Keeps a mean of what it has seen, as no class of torch's does, and counts its calls."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


def test_a_model_that_writes_a_buffer_has_no_replicas(tmp_path: Path) -> None:
    last, path = Averaging(), tmp_path / "measured.json"
    model = mlp().append(last)
    # The second finds the measurements in the file.
    for _ in range(2):
        choice = tuned(model, resume=path)
        assert {one.plan.placement.num_replicas for one in choice.proposals} == {1}
        assert last.calls == 0
        assert not last.mean.any()


@pytest.mark.parametrize("make", [mlp, Net])
def test_a_saved_choice_makes_the_same_pipeline(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 8)
    choice = tuned(model, sample=x, target=x)
    choice.save(tmp_path / "plan.json")
    sample = x if make is Net else None
    with (
        choice.pipeline() as one,
        pykern.Pipeline(
            model, tuned=tmp_path / "plan.json", loss_fn=F.mse_loss, sample=sample
        ) as other,
    ):
        assert one.plan == other.plan
        assert one.partition.stages == other.partition.stages
        assert torch.equal(one.step(x, target=x), other.step(x, target=x))


def test_memory_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_CHUNKS", 1)
    model, x = mlp(), torch.randn(8, 8)
    free = tuned(model, sample=x, target=x)
    memory = 0.8 * max(max(one.peak_bytes) for one in free.proposals)
    choice = tuned(model, sample=x, target=x, memory=memory)
    assert all(max(one.peak_bytes) <= memory for one in choice.proposals)
    choice.save(tmp_path / "plan.json")
    with pykern.Pipeline(model, tuned=tmp_path / "plan.json", loss_fn=F.mse_loss) as pipe:
        expected = F.mse_loss(model(x), x).detach()
        torch.testing.assert_close(pipe.step(x, target=x), expected)


def test_what_was_run_has_the_bytes_of_its_pipeline() -> None:
    model, x = mlp(), torch.randn(8, 8)
    choice = tuned(model, sample=x, target=x)
    for one in choice.proposals[: run.TRIED]:
        with choice.asked.pipeline(one.plan, one.spans, recompute=one.levels) as pipe:
            devices = pipe.memory(x, target=x).devices
        assert one.activation_bytes == tuple(device.activations for device in devices)


def test_what_needs_more_than_the_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three that are weighed need more than the search took them to."""
    model, x = mlp(), torch.randn(8, 8)
    memory = 10.0**6
    heavy = [(10.0**7,) * 2] * 3

    def weighed(_: Asked, one: Proposal) -> Proposal:
        return replace(one, activation_bytes=heavy.pop()) if heavy else one

    monkeypatch.setattr(weigh, "_weighed", weighed)
    choice = tuned(model, sample=x, target=x, memory=memory)
    assert heavy == []
    assert all(max(one.peak_bytes) <= memory for one in choice.proposals)
    assert sum(one.measured_ns is not None for one in choice.proposals) == run.TRIED
    monkeypatch.setattr(weigh, "_weighed", lambda _, one: replace(one, activation_bytes=(2e7,) * 2))
    with pytest.raises(ValueError, match=r"the best \d+ need 2\d+ or more\. Use more devices"):
        tuned(model, sample=x, target=x, memory=memory)


@pytest.mark.usefixtures("injected")
def test_the_table_has_a_row_for_each_candidate() -> None:
    choice = tuned(mlp())
    lines = str(choice).splitlines()
    assert lines[0].split()[:3] == ["cut", "schedule", "microbatches"]
    assert len(lines) == 2 + min(len(choice.proposals), 10)
    assert lines[-1].startswith("batches of 4 rows, 4 units, 2 devices")


@pytest.mark.usefixtures("injected")
def test_an_interrupt_of_the_last_part_has_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object, ran: list[Proposal], __: object) -> Iterator[list[Proposal]]:
        yield ran[::-1]
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_in_turn", interrupted)
    with pytest.raises(pykern.TuneInterrupted) as caught:
        tuned(mlp())
    proposals = caught.value.choice.proposals
    # The first three as they were ranked by then.
    assert proposals[0].predicted_ns >= proposals[2].predicted_ns


@pytest.mark.usefixtures("injected")
def test_an_interrupt_of_the_search_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProposalSearch, "run", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        tuned(mlp())
    assert type(caught.value) is KeyboardInterrupt


def test_measurements_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = mlp(), tmp_path / "measured.json"
    first = tuned(model, resume=path)
    monkeypatch.setattr(cache, "measure", None)
    assert tuned(model, resume=path).measured == first.measured
    narrow, frozen = mlp(), mlp()
    narrow[1], narrow[2] = nn.Linear(8, 4), nn.Linear(4, 8)
    frozen[0].requires_grad_(False)
    for other, more in (
        (mlp()[:3], {}),
        (narrow, {}),
        (frozen, {}),
        (model, {"devices": "cpu:3"}),
        (model, {"sample": torch.ones(4, 2, 8), "target": torch.ones(4, 2, 8)}),
    ):
        with pytest.raises(ValueError, match="resume must be a file of the same model"):
            tuned(other, resume=path, **more)


def test_levels_are_measured_where_memory_is_limited(tmp_path: Path) -> None:
    model, path = mlp(), tmp_path / "measured.json"
    unlimited = tuned(model, resume=path).measured
    assert levels_in(unlimited) == ("ops",)
    limited = tuned(model, resume=path, memory=2**30).measured
    assert levels_in(limited) == LEVELS
    assert limited.times_ns == unlimited.times_ns
    # They are in the file from then on, and of use to a call without a limit.
    assert Measurements.from_json(path.read_text()) == limited
    assert tuned(model, resume=path).measured == limited


def test_resumed_measurements_have_the_state_of_another_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    plain = sum(tuned(mlp(), resume=path).measured.weights)
    found = tuned(mlp(), resume=path, optimizer=torch.optim.AdamW).measured
    # Gradients, and two moments of the same size; each parameter has a count of its own.
    assert sum(found.weights) == 2 * plain + 8 * 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss_fn": None}, "loss_fn must be callable, got NoneType"),
        ({"memory": 0}, "memory must be a number of bytes above 0, got 0"),
        ({"memory": "4GB"}, "memory must be a number of bytes above 0, got '4GB'"),
        ({"memory": [2**30] * 2}, "memory must be a number of bytes above 0"),
        ({"model": nn.Sequential()}, "the model must have at least 1 layer, one for each stage"),
        ({"batch_size": 0}, "batch_size must be 1 to"),
        ({"microbatches": 4}, "microbatches must be left out of tune, which chooses it, got 4"),
        ({"recompute": "layer"}, "recompute must be left out of tune, which chooses it"),
        ({"devices": "cpu:7"}, "devices must be at most 4"),
        ({"target": None}, "target must be given for the loss .*, got None. Give it by target="),
        ({"target": torch.ones(3, 8)}, "target must have as many rows"),
    ],
)
@pytest.mark.usefixtures("injected")
def test_what_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tuned(**({"model": mlp()} | more))


@pytest.mark.parametrize("more", [{"recompute": "layer"}, {"schedule": "gpipe"}])
@pytest.mark.usefixtures("injected")
def test_a_choice_is_not_changed_in_part(more: dict[str, Any]) -> None:
    choice = tuned(mlp())
    with pytest.raises(ValueError, match="must be left out of tune, which chooses it"):
        choice.pipeline(**more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"schedule": "gpipe"}, "schedule must be left out beside tuned=, got 'gpipe'"),
        ({"microbatches": 2}, "microbatches must be left out beside tuned=, got 2"),
        ({"balance": "layers"}, "balance must be left out"),
        ({"model": mlp()[:3]}, "tuned must be for a model of 3 layers"),
        ({"devices": "cpu:3"}, "devices must be 2, as in the plan, got 3"),
    ],
)
@pytest.mark.usefixtures("injected")
def test_what_does_not_go_with_a_file(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    tuned(mlp()).save(tmp_path / "plan.json")
    model = more.pop("model", mlp())
    with pytest.raises(ValueError, match=message):
        pykern.Pipeline(model, tuned=tmp_path / "plan.json", loss_fn=F.mse_loss, **more)


def test_a_plan_that_is_not_in_a_file_is_refused() -> None:
    """Python told of paths."""
    with pytest.raises(TypeError, match=r"tuned must be the path of a file, got a \w+\. Give"):
        pykern.Pipeline(mlp(), tuned=object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "must be a JSON object"),
        (b'{"format": "pykern-plan", "version": 1}', "format must be 'pykern-tuned'"),
        (b'{"format": "pykern-tuned", "version": 1}', "the file must have the key 'devices'"),
        (b"", "the text must be JSON, got its end"),
        (b"\x80\x02torch", "must be ASCII, got byte 128"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"tuned must be a file that .*plan\.json.*{message}"):
        pykern.Pipeline(mlp(), tuned=path)
    with pytest.raises(ValueError, match=r"measurements must be those of|must be ASCII, got"):
        tuned(mlp(), resume=path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_layers", "4", r'num_layers must be a whole number, got "4"'),
        ("devices", 2, "devices must be a list of names, got 2"),
        # `split_at=None` would cut the model in another place.
        ("split_at", None, "split_at must be a list of names, got null"),
        ("split_at", [2], r"split_at must be a list of names, got \[2\]"),
        (
            "recompute",
            "layer",
            'recompute must be null or, by stage, a list of levels, got "layer"',
        ),
        ("recompute", [["layer", 1]], "recompute must be null or"),
    ],
)
@pytest.mark.usefixtures("injected")
def test_values_that_no_choice_has_are_refused(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    tuned(mlp()).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=rf"tuned must be a file that .*plan\.json.*{message}"):
        pykern.Pipeline(mlp(), tuned=path, loss_fn=F.mse_loss)


def test_devices_are_needed_without_a_file() -> None:
    with pytest.raises(TypeError, match="devices must be given, got None"):
        pykern.Pipeline(mlp(), microbatches=2)
