"""Bytes that the devices of a pipeline of CPU workers hold, measured while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pykern import Pipeline
from pykern.budget.live_bytes import LiveBytes
from pykern.plan import Kind


@contextmanager
def counted_bytes(pipe: Pipeline) -> Iterator[list[LiveBytes]]:
    """Within it, what the pipeline's actions make is counted, on each device for itself."""
    devices = [LiveBytes() for _ in range(pipe.plan.num_devices)]
    placement = pipe.plan.placement
    callbacks: dict[Kind, list[Callable[[int], None]]] = pipe._executor._callbacks
    before = {kind: list(actions) for kind, actions in callbacks.items()}
    for actions in callbacks.values():
        for number, action in enumerate(actions):
            replica, stage = divmod(number, pipe.plan.num_stages)
            actions[number] = _counted(devices[placement.device_of(stage, replica)], action)
    try:
        yield devices
    finally:
        callbacks.update(before)


def _counted(live: LiveBytes, action: Callable[[int], None]) -> Callable[[int], None]:
    def counted(microbatch: int) -> None:
        with live:
            action(microbatch)

    return counted
