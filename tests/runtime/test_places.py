"""Stages on several devices. The meta device, which has shapes and no values, is the other one."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from pykern.partition import partition
from pykern.partition.layers import place_layers, refuse_foreign_devices
from pykern.runtime.loss import Losses
from pykern.runtime.stage.layer_copies import copy_layers
from pykern.runtime.stage.replica import Replica
from pykern.runtime.stage.stage import Stage

CPU, META = torch.device("cpu"), torch.device("meta")


def devices_of(*modules: nn.Module) -> set[torch.device]:
    return {t.device for m in modules for t in (*m.parameters(), *m.buffers())}


def named(*modules: nn.Module) -> dict[str, nn.Module]:
    return {str(number): module for number, module in enumerate(modules)}


def place(layers: dict[str, nn.Module], *devices: torch.device) -> None:
    cut = partition(list(layers.values()), len(devices), balance="layers")
    place_layers(layers, cut, devices)


def test_layers_move_to_the_devices_of_their_stages() -> None:
    layers = named(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Tanh())
    kept = list(layers["0"].parameters())
    place(layers, CPU, META)
    assert devices_of(layers["0"], layers["1"]) == {CPU}
    assert devices_of(layers["2"]) == {META}
    assert all(a is b for a, b in zip(kept, layers["0"].parameters(), strict=True))


@pytest.mark.gpu
def test_parameters_that_move_to_a_gpu_stay_the_same_objects() -> None:
    layers = named(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = [p for layer in layers.values() for p in layer.parameters()]
    place(layers, torch.device("cuda", 0))
    after = [p for layer in layers.values() for p in layer.parameters()]
    assert [id(p) for p in after] == [id(p) for p in before]
    assert devices_of(*layers.values()) == {torch.device("cuda", 0)}


def test_what_several_stages_use_is_where_the_first_is() -> None:
    """Whole modules with their buffers, and parameters among others of a module."""
    block, first, last = nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    last.weight.grad = torch.ones(2, 2)
    place(named(block, first, nn.Sequential(block, nn.Linear(2, 2)), last), CPU, META)
    assert devices_of(block, first) == {CPU}
    assert last.weight is first.weight
    assert last.weight.grad.device == CPU
    assert last.bias.device == META


def test_a_module_of_two_stages_moves_to_the_first_only() -> None:
    shared = nn.BatchNorm1d(2, device=CPU)
    layers = named(shared, nn.Linear(2, 2), nn.Sequential(shared, nn.Linear(2, 2)))
    cut = partition(list(layers.values()), 2, balance=[2, 1])
    place_layers(layers, cut, [META, CPU])
    assert devices_of(shared, layers["1"]) == {META}
    assert layers["2"].get_parameter("1.weight").device == CPU


def test_a_module_without_tensors_can() -> None:
    tanh = nn.Tanh()
    place(named(tanh, tanh), CPU, META)


def test_a_torch_that_would_make_new_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = named(nn.Linear(2, 2), nn.Linear(2, 2))
    future = torch.__future__
    monkeypatch.setattr(future, "get_overwrite_module_params_on_conversion", lambda: True)
    place(layers, CPU, CPU)
    with pytest.raises(
        ValueError,
        match=r"must be False to move layer '1' to meta, got True, which makes new parameters",
    ):
        place(layers, CPU, META)
    assert devices_of(*layers.values()) == {CPU}


@pytest.mark.parametrize(("device_type", "whose"), [("cpu", "CPU workers"), ("cuda", "GPUs")])
def test_what_has_no_values_is_refused_by_name(device_type: str, whose: str) -> None:
    layers = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, device=META))]
    with pytest.raises(ValueError, match=rf"1\.0\.weight must be on .*, {whose}, got meta"):
        refuse_foreign_devices(layers, device_type)


def test_copies_of_layers_are_on_the_device_of_their_replica() -> None:
    shared = nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    originals = [nn.Sequential(shared, nn.BatchNorm1d(2)), nn.Sequential(frozen, shared)]
    copies, pairs = copy_layers(originals, META)
    assert devices_of(*originals) == {CPU}
    assert {t.device for copy in copies for t in copy.buffers()} == {META}
    assert len(pairs) == len({id(copy) for _, copy in pairs}) == 6
    for original, copy in pairs:
        assert copy.device == META
        assert copy.requires_grad == original.requires_grad
    first, second = copies
    assert isinstance(first, nn.Sequential)
    assert isinstance(second, nn.Sequential)
    assert first[0].weight is second[1].weight


def test_on_the_device_of_the_original_nothing_is_copied() -> None:
    layer = nn.BatchNorm1d(2)
    for device in (None, CPU):
        (copy,), pairs = copy_layers([layer], device)
        assert isinstance(copy, nn.BatchNorm1d)
        assert copy.running_mean is layer.running_mean
        assert all(copied.data_ptr() == original.data_ptr() for original, copied in pairs)


def test_gradients_of_a_replica_are_added_on_the_device_of_the_original() -> None:
    layer = nn.Linear(2, 2, device=META)
    stage = Stage(0, [layer], META)
    replica = Replica(stage, CPU)
    replica._pairs = [
        (parameter, SimpleNamespace(grad=torch.ones(parameter.shape)))  # type: ignore[misc]
        for parameter in layer.parameters()
    ]
    stage.reduce(0)
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.device == META


def test_losses_of_several_devices_are_added_on_the_first() -> None:
    losses = Losses(lambda loss: loss, None, [0.5, 0.5])
    outputs: list[Tensor] = [torch.ones((), device=device) for device in (META, CPU)]
    for microbatch, output in enumerate(outputs):
        (loss,), (gradient,) = losses(microbatch, output.requires_grad_(), once=True)
        assert gradient.device == loss.device == output.device
    assert losses.total().device == META
