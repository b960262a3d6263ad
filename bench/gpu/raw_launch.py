"""Raw launch against replay(): bit for bit, random numbers found out, frozen masks shown."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from .frame import Json
from .tools import DEVICE, captured, launch, own_stream, warm

Start = Callable[[torch.cuda.CUDAGraph, torch.cuda.Stream], None]


def run(folder: Path) -> Json:
    torch.manual_seed(0)
    stream = own_stream()
    return {**plain(stream), **random(stream)}


def control() -> bool:
    """A launch that launches nothing."""
    return not any(plain(own_stream(), lambda graph, stream: None)["raw_equals_replay"])


@torch.no_grad()
def plain(stream: torch.cuda.Stream, start: Start = launch) -> Json:
    layer = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(DEVICE)
    static = torch.randn(64, 512, device=DEVICE)
    warm(lambda: layer(static), stream)
    graph, output = captured(lambda: layer(static), stream)
    equal = []
    for _ in range(5):
        static.copy_(torch.randn_like(static))
        graph.replay()
        torch.cuda.synchronize()
        replayed = output.clone()
        output.zero_()
        torch.cuda.synchronize()
        start(graph, stream)
        torch.cuda.synchronize()
        equal.append(torch.equal(output, replayed))
    return {"raw_equals_replay": equal, "plain_draws": draws(graph)}


@torch.no_grad()
def random(stream: torch.cuda.Stream) -> Json:
    dropout, ones = nn.Dropout(0.5), torch.ones(4096, device=DEVICE)
    warm(lambda: dropout(ones), stream)
    graph, output = captured(lambda: dropout(ones), stream)

    def launched() -> Tensor:
        launch(graph, stream)
        torch.cuda.synchronize()
        return output.clone()

    def replayed() -> Tensor:
        graph.replay()
        torch.cuda.synchronize()
        return output.clone()

    return {
        "dropout_draws": draws(graph),
        "replays_differ": not torch.equal(replayed(), replayed()),
        "raw_masks_frozen": torch.equal(launched(), launched()),
    }


def draws(graph: torch.cuda.CUDAGraph) -> int:
    """By how much a replay moves the generator: more than 0 where the graph draws numbers."""
    generator = torch.cuda.default_generators[DEVICE.index]
    before = generator.get_offset()
    graph.replay()
    torch.cuda.synchronize()
    return int(generator.get_offset() - before)
