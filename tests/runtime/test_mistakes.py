"""Arguments that users mistake: each is told, with the way out, before any layer runs."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.pipeline.arguments import Arguments
from pykern.plan import Plan

X, Y = torch.randn(8, 4), torch.randn(8, 4)


class Counts(nn.Linear):
    """A layer that counts its calls."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        Counts.calls += 1
        return super().forward(input)


class Scaled(nn.Linear):
    """A layer with an argument by name."""

    def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(input) * scale


class Net(nn.Module):
    """A model with a forward of its own, and something that it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Counts(4, 4), Counts(4, 4)
        self.config = {"width": 4}
        self._kept = 3

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = self.first(x)
        return self.second(x if shift is None else x + shift)

    def generate(self) -> Tensor:
        return self(X)


def make(model: Any = None, **options: Any) -> pykern.Pipeline:
    defaults = {"devices": "cpu:2", "microbatches": 4, "loss_fn": nn.MSELoss()}
    model = nn.Sequential(*(Counts(4, 4) for _ in range(4))) if model is None else model
    return pykern.Pipeline(model, **{**defaults, **options})


def recorded() -> pykern.Pipeline:
    return make(Net(), sample=X[:2])


CONSTRUCTION = {
    "the class of a model": (
        lambda: make(Net),
        TypeError,
        "model must be an nn.Module or a list of them, got the class Net. Make the model first: "
        "Net(...)",
    ),
    "the class of a loss": (
        lambda: make(loss_fn=nn.MSELoss),
        TypeError,
        "loss_fn must be a function of (output, target), got the class MSELoss. Make the loss "
        "first: MSELoss()",
    ),
    "no loss": (
        lambda: make(loss_fn="mse"),
        TypeError,
        "loss_fn must be a function of (output, target), got 'mse'. Give the function, such as "
        "torch.nn.functional.mse_loss",
    ),
    "an option near an argument": (
        lambda: make(recomputation="stage"),
        TypeError,
        "arguments must be the pipeline's own or options of the schedule 'one_f_one_b' (it has no "
        "options), got recomputation=. Did you mean recompute=?",
    ),
    "an option near one of the schedule": (
        lambda: make(schedule="interleaved", chunks=2),
        TypeError,
        "arguments must be the pipeline's own or options of the schedule 'interleaved' "
        "(num_chunks, group), got chunks=. Did you mean num_chunks=?",
    ),
    "another library's word": (
        lambda: make(num_stages=2),
        TypeError,
        "arguments must be the pipeline's own or options of the schedule 'one_f_one_b' (it has no "
        "options), got num_stages=. Did you mean devices=?",
    ),
    "a device": (
        lambda: pykern.Pipeline(nn.Sequential(Counts(4, 4)), device="cpu:2"),
        TypeError,
        "arguments must be the pipeline's own or options of the schedule 'one_f_one_b' (it has no "
        "options), got device=. Did you mean devices=?",
    ),
    "an option like nothing": (
        lambda: make(amp=True),
        TypeError,
        "arguments must be the pipeline's own or options of the schedule 'one_f_one_b' (it has no "
        "options), got amp=. Omit amp",
    ),
    "no microbatch": (
        lambda: make(microbatches=0),
        ValueError,
        "microbatches must be 1 to 16777216, got 0",
    ),
    "workers with numbers": (
        lambda: make(devices=["cpu:0", "cpu:1"]),
        ValueError,
        "device 'cpu:0' in a list must be 'cpu', since CPU workers have no numbers. Use "
        "devices='cpu:2' for two",
    ),
}

CALLS = {
    "a target by position": (
        lambda: make().step(X, Y),
        TypeError,
        "inputs must be those of Counts.forward(input), got 2 by position: too many positional "
        "arguments. Name the target of the loss: step(x, target=y)",
    ),
    "a target by position, recorded": (
        lambda: recorded().step(X, X, Y),
        TypeError,
        "inputs must be those of Net.forward(x, shift), got 3 by position: too many positional "
        "arguments. Name the target of the loss: step(x, target=y)",
    ),
    "too many for a forward": (
        lambda: recorded()(X, X, X),
        TypeError,
        "inputs must be those of Net.forward(x, shift), got 3 by position: too many positional "
        "arguments. Call the pipeline as the model itself is called",
    ),
    "a word that the model does not have": (
        lambda: recorded().step(X, shifted=X, target=Y),
        TypeError,
        "inputs must be those of Net.forward(x, shift), got 1 by position and shifted by name: got "
        "an unexpected keyword argument 'shifted'. Call the pipeline as the model itself is called",
    ),
    "a number for a schedule": (
        lambda: make(schedule=3),
        TypeError,
        "schedule must be a name, a Plan, or a function of (num_devices, num_microbatches) that "
        "returns a Plan, got 3. For example schedule='one_f_one_b'",
    ),
    "a file for a schedule": (
        lambda: make(schedule="plan.json"),
        ValueError,
        "schedule must be a name or a Plan, got the file 'plan.json'. Read it: "
        "schedule=pykern.plan.load_plan('plan.json')",
    ),
    "a schedule that returns something else": (
        lambda: make(schedule=lambda *_: [1]),
        TypeError,
        "schedule must be a name, a Plan, or a function of (num_devices, num_microbatches) that "
        "returns a Plan, got a function of [1]. For example schedule='one_f_one_b'",
    ),
    "targets": (
        lambda: make().step(X, targets=Y),
        TypeError,
        "arguments by name must be those that a layer's forward names (here no layer names any), "
        "got targets=. Did you mean target=?",
    ),
    "a layer's word": (
        lambda: make(nn.Sequential(Counts(4, 4), Scaled(4, 4))).step(X, scal=2.0, target=Y),
        TypeError,
        "arguments by name must be those that a layer's forward names (scale), got scal=. Did you "
        "mean scale=?",
    ),
    "a target for a forward": (
        lambda: make()(X, target=Y),
        TypeError,
        "arguments by name must be those that a layer's forward names (here no layer names any), "
        "got target=. Omit target",
    ),
    "a stream of nothing": (
        lambda: make().stream(3),  # type: ignore[arg-type]
        TypeError,
        "batches must be an iterable of batches, got int. Give a list, a generator or a DataLoader",
    ),
    "a stream": (
        lambda: list(make().stream([(X, X)])),
        TypeError,
        "inputs must be those of Counts.forward(input), got 2 by position: too many positional "
        "arguments. Call the pipeline as the model itself is called",
    ),
    "no target": (
        lambda: make().step(X),
        TypeError,
        "target must be given for the loss MSELoss(input, target), got None. Give it by target=",
    ),
    "no target for the memory": (
        lambda: make().memory(X),
        TypeError,
        "target must be given for the loss MSELoss(input, target), got None. Give it by target=",
    ),
    "a target that the loss does not take": (
        lambda: make(loss_fn=lambda output: output.mean()).step(X, target=Y),
        TypeError,
        "loss_fn must take an output and a target, got <lambda>(output). Omit target= for a loss "
        "of the output alone, and give a target of the model's own by position",
    ),
    "a target of other rows": (
        lambda: make().step(X, target=Y[:4]),
        ValueError,
        "target must have as many rows in dimension 0 as the tensors before it have, 8, got 4 "
        "(shape (4, 4)). Give one row for each sample",
    ),
    "arguments of other rows": (
        lambda: recorded().step(X, X[:3], target=Y),
        ValueError,
        "inputs[1] must have as many rows in dimension 0 as the tensors before it have, 8, got 3 "
        "(shape (3, 4)). Give one row for each sample",
    ),
    "an array": (
        lambda: make().step(np.ones((8, 4), dtype=np.float32), target=Y),
        ValueError,
        "arrays of a batch must be tensors, got a ndarray of shape (8, 4). Use "
        "torch.from_numpy(array)",
    ),
    "compile": (
        lambda: make().compile(),
        RuntimeError,
        "compile must be chosen when a pipeline is made. Use Pipeline(..., compile='stages'), or "
        "call compile() of each layer before",
    ),
    "a method of the model": (
        lambda: recorded().generate(),
        AttributeError,
        "generate must be called on the model itself, since it is a method of Net, which would "
        "not run on the pipeline's devices. Keep the model that the pipeline was made of, and "
        "call model.generate()",
    ),
    "another device": (
        lambda: make().to("meta"),
        RuntimeError,
        "the devices of a pipeline must stay as they were when it was made, got meta for layers "
        "on cpu. Make a new one: Pipeline(..., devices=...)",
    ),
}

Mistake = tuple[Callable[[], object], type[Exception], str]


MISTAKES: dict[str, Mistake] = {**CONSTRUCTION, **CALLS}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_the_way_out(mistake: str) -> None:
    call, error, message = MISTAKES[mistake]
    before = Counts.calls
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
    # A recording is one forward of the model.
    assert Counts.calls - before in (0, 2)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("1f1b", "one_f_one_b"),
        ("1F1B", "one_f_one_b"),
        ("Interleaved1F1B", "interleaved"),
        ("ZBVZeroBubble", "zb_v"),
        ("zb-h1", "zb_h1"),
        ("DualPipe", "dualpipe_v"),
        ("GPipe", "gpipe"),
        ("hanayoo", "hanayo"),
    ],
)
def test_the_schedule_that_was_meant_is_named(word: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"got '{word}'\. Did you mean '{meant}'\?$"):
        make(schedule=word)


def test_options_of_a_function_are_its_own_whatever_its_name() -> None:
    def hanayo(num_devices: int, num_microbatches: int, mine: int = 1) -> Plan:
        return schedules.gpipe(num_devices, num_microbatches * mine)

    with make(schedule=hanayo, mine=2) as pipe:
        assert pipe.plan.num_microbatches == 8
    with pytest.raises(TypeError, match=r"'hanayo' \(mine\), got waves=\. Omit waves$"):
        make(schedule=hanayo, waves=2)


def test_a_loss_of_a_call_is_not_taken_for_the_pipelines() -> None:
    with make() as pipe:
        assert len(pipe.map(lambda output: output.mean(), X)) == 4
        with pytest.raises(TypeError, match="target must be given for the loss MSELoss"):
            pipe.step(X)


def test_a_loss_of_a_step_is_saved_as_any_tensor() -> None:
    """Nothing hangs on it, such as a backward with a message, that torch.load would refuse."""
    with make() as pipe:
        loss = pipe.step(X, target=Y)
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["loss"], loss)


def test_what_the_model_knows_the_pipeline_knows() -> None:
    with recorded() as pipe:
        assert pipe.config == {"width": 4}
        assert not hasattr(pipe, "generate")
        assert not hasattr(pipe, "_kept")
        with pytest.raises(AttributeError, match="'Pipeline' object has no attribute 'nothing'"):
            _ = pipe.nothing


def test_a_dtype_may_change_where_no_device_does() -> None:
    with make() as pipe:
        pipe.double()
        assert pipe.step(X.double(), target=Y.double()).dtype is torch.float64


def test_what_cannot_be_asked_is_left_to_the_layers() -> None:
    """Hooks change what a forward is given; so may whatever has no signature."""

    class TakesTwo(nn.Linear):
        def forward(  # type: ignore[override]
            self, input: Tensor, other: Tensor
        ) -> Tensor:
            return super().forward(input + other)

    first = TakesTwo(4, 4)
    first.register_forward_pre_hook(lambda _, args: (*args, args[0]))
    with make(nn.Sequential(first, nn.Linear(4, 4))) as pipe:
        assert pipe.step(X, target=Y).dim() == 0


def test_each_form_of_a_call_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    look = Arguments._require_call

    def counted(self: Arguments, args: Any, named: Any, may_target: bool) -> None:
        asked.append(len(args))
        look(self, args, named, may_target)

    monkeypatch.setattr(Arguments, "_require_call", counted)
    with make() as pipe:
        for _ in range(3):
            pipe.step(X, target=Y)
            pipe(X)
    assert asked == [1, 1]
