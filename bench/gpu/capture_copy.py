"""cuMemcpyAsync and fork and join by events, captured on one device and replayed."""

from pathlib import Path

import torch

from .frame import Json
from .tools import DEVICE, captured, checked, driver, launch, own_stream, warm


def run(folder: Path) -> Json:
    return measure(copies=True)


def control() -> bool:
    """A capture without the copy."""
    return not measure(copies=False)["right"]


def measure(*, copies: bool) -> Json:
    stream, side = own_stream(), own_stream()
    source = torch.zeros(1 << 16, device=DEVICE)
    copied, doubled = torch.zeros_like(source), torch.zeros_like(source)

    def work() -> None:
        source.add_(1)
        side.wait_stream(stream)
        ends, num_bytes = (copied.data_ptr(), source.data_ptr()), 4 * source.numel()
        if copies:
            checked(driver().cuMemcpyAsync(*ends, num_bytes, side.cuda_stream))
        torch.mul(source, 2, out=doubled)
        stream.wait_stream(side)
        doubled.add_(copied)

    warm(work, stream)
    source.zero_()
    torch.cuda.synchronize()
    # Copies the value as it is when the graph runs: 3 times the number of launches.
    graph, _ = captured(work, stream)
    values = []
    for _ in range(3):
        launch(graph, stream)
        torch.cuda.synchronize()
        values.append([copied[0].item(), doubled[0].item()])
    return {"values": values, "right": values == [[n, 3 * n] for n in (1.0, 2.0, 3.0)]}
