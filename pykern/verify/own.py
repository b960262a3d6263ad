"""Parameters that collect sums of their own: of stages that share one, and of replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..runtime.stage.layer_copies import Pairs, add_gradients
from ..runtime.stage.stage import Stage
from ..tensors.parameters import with_values


class Sums:
    """The order of gradient sums in the plain model.

    If stages share a parameter, the first stage has the parameter and every other stage has a
    stand-in with the same values. All stages of further replicas have stand-ins too. At the end the
    sums of the stand-ins are added: first over replicas, then over stages, in ascending order.

    Args:
        modules: the modules that hold the parameters.
        stages: of the first replica.
        num_replicas: the number of replicas, which take turns with the microbatches.
    """

    def __init__(
        self, modules: Sequence[nn.Module], stages: Sequence[Stage], num_replicas: int
    ) -> None:
        self._tables = [
            {
                stage.index: dict(_stand_ins(stage, owned, replica))
                for stage, owned in _owned(stages)
            }
            for replica in range(num_replicas)
        ]
        replaced = {one for of in self._tables for table in of.values() for one in table}
        self._places = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter in replaced
        ]

    def use(self, replica: int, stage: int) -> None:
        """Gives the modules the parameters or stand-ins of this stage of the replica."""
        table = self._tables[replica][stage]
        for module, name, original in self._places:
            # As an attribute, because recurrent layers note their parameters elsewhere too.
            setattr(module, name, table.get(original, original))

    def add(self) -> None:
        """Puts the parameters back into the modules and adds the sums of all stand-ins."""
        for module, name, original in self._places:
            setattr(module, name, original)
        first, *others = self._tables
        for table in others:
            for stage, stand_ins in table.items():
                homes = first[stage]
                add_gradients([(homes.get(one, one), own) for one, own in stand_ins.items()])
        for stand_ins in first.values():
            pairs: Pairs = list(stand_ins.items())
            add_gradients(pairs)


def _owned(stages: Sequence[Stage]) -> Iterator[tuple[Stage, set[nn.Parameter]]]:
    """Each stage, with the parameters of those before it."""
    owned: set[nn.Parameter] = set()
    for stage in stages:
        yield stage, set(owned)
        owned.update(_parameters(stage))


def _parameters(stage: Stage) -> Iterator[nn.Parameter]:
    for layer in stage.originals:
        yield from layer.parameters()


def _stand_ins(
    stage: Stage, owned: set[nn.Parameter], replica: int
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    for parameter in _parameters(stage):
        trains = parameter.requires_grad and torch.is_grad_enabled()
        foreign = parameter.device != stage.device and parameter.device.type != "meta"
        if (replica > 0 and trains) or (parameter in owned and (trains or foreign)):
            values = parameter.detach().to(stage.device)
            own = with_values(parameter, values)
            main = getattr(parameter, "main_grad", None)
            if main is not None:
                own.main_grad = torch.zeros_like(main, device=stage.device)  # type: ignore[attr-defined]
            yield parameter, own
