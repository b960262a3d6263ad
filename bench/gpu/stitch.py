"""Two captures and a copy between them, stitched into one graph by the driver."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .frame import Json
from .tools import DEVICE, call_us, captured, checked, driver, launch, own_stream, warm


def run(folder: Path) -> Json:
    return measure(copies=True)


def control() -> bool:
    """A stitched graph without the copy."""
    return not measure(copies=False)["equal"]


@torch.no_grad()
def measure(*, copies: bool) -> Json:
    torch.manual_seed(0)
    cu, stream = driver(), own_stream()
    first, second = nn.Linear(256, 256).to(DEVICE), nn.Linear(256, 256).to(DEVICE)
    x, landing = torch.randn(64, 256, device=DEVICE), torch.zeros(64, 256, device=DEVICE)
    warm(lambda: second(first(x)), stream)
    one, sent = captured(lambda: first(x), stream, keep=True)
    two, result = captured(lambda: second(landing), stream, keep=True)
    num_bytes = 4 * sent.numel()
    whole = checked(cu.cuGraphCreate(0))
    node = checked(cu.cuGraphAddChildGraphNode(whole, [], 0, one.raw_cuda_graph()))
    if copies:
        copy = copy_of(landing.data_ptr(), sent.data_ptr(), num_bytes)
        context = checked(cu.cuCtxGetCurrent())
        node = checked(cu.cuGraphAddMemcpyNode(whole, [node], 1, copy, context))
    checked(cu.cuGraphAddChildGraphNode(whole, [node], 1, two.raw_cuda_graph()))
    executable = checked(cu.cuGraphInstantiate(whole, 0))

    def by_action() -> None:
        launch(one, stream)
        checked(
            cu.cuMemcpyAsync(landing.data_ptr(), sent.data_ptr(), num_bytes, stream.cuda_stream)
        )
        launch(two, stream)

    def at_once() -> None:
        checked(cu.cuGraphLaunch(executable, stream.cuda_stream))

    by_action()
    torch.cuda.synchronize()
    wanted = result.clone()
    landing.zero_()
    result.zero_()
    torch.cuda.synchronize()
    at_once()
    torch.cuda.synchronize()
    return {
        "equal": torch.equal(result, wanted),
        "by_action_us": call_us(by_action, 50),
        "at_once_us": call_us(at_once, 50),
    }


def copy_of(to: int, source: int, num_bytes: int) -> Any:
    """One row of bytes, device to device."""
    cu = driver()
    copy = cu.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = to_pointer(source), to_pointer(to)
    copy.WidthInBytes, copy.Height, copy.Depth = num_bytes, 1, 1
    return copy


def to_pointer(address: int) -> Any:
    return driver().CUdeviceptr(address)
