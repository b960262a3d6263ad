"""Objects that stages cannot share, and steps of stages that share and fail."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from pykern.runtime.gpu.capture.refusals import CannotCapture
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.tied_models import WIDTH, batch, pipeline, require_bits, tied_ends
from tests.runtime.untied import Untied


def test_running_statistics_of_two_stages_are_refused() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm)
    message = (
        r"1.running_mean \(stage 0\) and 3.running_mean \(stage 1\) must be two buffers, got "
        r"one, to which stages would write in no fixed order"
    )
    with pytest.raises(ValueError, match=message):
        pipeline(model, balance=[2, 2])
    with pipeline(model, balance=[1, 3]) as pipe:
        pipe.step(*batch()[:1], target=batch()[1])


def test_layers_that_cannot_have_copies_are_refused() -> None:
    model = tied_ends()
    model[2].forward = model[2].forward
    message = r"2 \(Linear\) has a forward of its own.*stage 1 would need a copy of it"
    with pytest.raises(ValueError, match=message):
        pipeline(model)


class Counts(nn.Linear):
    """Counts its calls in a buffer, or puts another in its place."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.in_place = in_place
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if self.in_place:
            self.count.add_(1)
        else:
            self.count = self.count + 1
        return super().forward(input)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_buffer_of_two_stages_must_not_be_written(in_place: bool) -> None:
    shared = Counts(in_place=in_place)
    with pipeline(nn.Sequential(shared, nn.Tanh(), shared)) as pipe:
        x, y = batch()
        with pytest.raises(RuntimeError, match=r"stage 1 wrote the buffer 'count' of a Counts"):
            pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match=r"stage 1 wrote the buffer 'count' of a Counts"):
            pipe(x)


class CountsBack(Counts):
    """Counts its backwards, while the forwards of another stage may count as well."""

    def __init__(self) -> None:
        super().__init__(in_place=True)

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if output.requires_grad:
            output.register_hook(self._count)
        return output

    def _count(self, _: Tensor) -> None:
        self.count.add_(1)


def test_a_write_by_another_stage_during_a_backward_is_not_the_backward_s() -> None:
    """Stage 0 sees a buffer of both stages change in its backwards, whoever writes it then."""
    shared = CountsBack()
    with pipeline(nn.Sequential(shared, nn.Tanh(), shared)) as pipe:
        x, y = batch()
        with pytest.raises(RuntimeError, match=r"stage 1 wrote the buffer 'count' of a Counts"):
            pipe.step(x, target=y)


def test_a_layer_that_shares_a_parameter_may_write_buffers_of_its_own() -> None:
    first, last = nn.Linear(WIDTH, WIDTH), Counts(in_place=True)
    last.weight = first.weight
    x, y = batch()
    with pipeline(nn.Sequential(first, last)) as pipe:
        pipe.step(x, target=y)
        assert last.count == 4
        last.in_place = False
        with pytest.raises(RuntimeError, match="'count' of a Counts"):
            pipe.step(x, target=y)


def test_graphs_are_refused_because_copies_change(gpus: FakeCuda) -> None:
    model = tied_ends()
    x, y = batch()
    devices = ["cuda:0", "cuda:1"]
    with pipeline(model, devices=devices, capture=True) as pipe:
        pipe.step(x, target=y)
        with pytest.raises(CannotCapture, match="stage 1 uses what an earlier stage uses as well"):
            pipe.step(x, target=y)


def test_where_graphs_are_not_demanded_steps_run_as_usual(gpus: FakeCuda) -> None:
    model = tied_ends()
    x, y = batch()
    with pipeline(model, devices=["cuda:0", "cuda:1"], capture="auto") as pipe:
        untied = Untied(model, pipe.partition.stages)
        require_bits(pipe, untied, x, y)
        with pytest.warns(UserWarning, match="stage 1 uses what an earlier stage uses as well"):
            require_bits(pipe, untied, x, y)
        require_bits(pipe, untied, x, y)


def test_a_failed_step_leaves_nothing_of_the_copies() -> None:
    model = tied_ends()
    copies: list[weakref.ref[Tensor]] = []

    def fail_in_third(module: nn.Module, *_: object) -> None:
        copies.append(weakref.ref(module.get_parameter("weight")))
        if len(copies) == 3:
            raise KeyError("third")

    model[2].register_forward_hook(fail_in_third)
    with pipeline(model) as pipe:
        untied = Untied(model, pipe.partition.stages)
        x, y = batch()
        with pytest.raises(KeyError, match="third"):
            pipe.step(x, target=y)
        model.zero_grad()
        require_bits(pipe, untied, x, y)
        gc.collect()
        assert len(copies) == 3 + 2 * 4
        # The copy of the model has the hook as well.
        assert sum(copy() is not None for copy in copies) == 4


def test_a_hook_that_fails_for_the_sum_of_a_stage_is_told_apart() -> None:
    model = tied_ends()
    calls = 0

    def fail(_: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise KeyError("last")

    model.get_parameter("0.weight").register_hook(fail)
    x, y = batch()
    with pipeline(model) as pipe, pytest.raises(KeyError) as caught:
        pipe.step(x, target=y)
    assert caught.value.__notes__ == [
        "pykern: raised while the gradients of several stages were added"
    ]
