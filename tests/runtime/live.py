"""What the devices of a pipeline of CPU workers hold, measured while it runs."""

from collections.abc import Callable

from pykern import Pipeline
from pykern.live_bytes import LiveBytes
from pykern.plan import Kind


def count_bytes(pipe: Pipeline) -> list[LiveBytes]:
    """Has every action of the pipeline counted on its device from now on."""
    devices = [LiveBytes() for _ in range(pipe.plan.num_devices)]
    placement = pipe.plan.placement
    callbacks: dict[Kind, list[Callable[[int], None]]] = pipe._executor._callbacks
    for of_kind in callbacks.values():
        for number, action in enumerate(of_kind):
            replica, stage = divmod(number, pipe.plan.num_stages)
            of_kind[number] = _counted(devices[placement.device_of(stage, replica)], action)
    return devices


def _counted(live: LiveBytes, action: Callable[[int], None]) -> Callable[[int], None]:
    def counted(microbatch: int) -> None:
        with live:
            action(microbatch)

    return counted
