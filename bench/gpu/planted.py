"""Faults for a tool to find: python -m bench.gpu.planted memcheck, or racecheck."""

import importlib
import sys

from .tools import checked, driver, own_stream

SOURCES = {
    # A megabyte behind four bytes of an allocation of its own.
    "memcheck": 'extern "C" __global__ void fault(int* p) { p[(1 << 18) + threadIdx.x] = 1; }',
    # All threads add to one number in shared memory, with nothing between them.
    "racecheck": r"""
extern "C" __global__ void fault(int* p) {
    __shared__ int sum;
    sum = 0;
    sum += threadIdx.x;
    if (threadIdx.x == 0) *p = sum;
}
""",
}


def run(tool: str) -> None:
    cupy = importlib.import_module("cupy")
    stream = own_stream()
    memory = checked(driver().cuMemAlloc(4))
    with cupy.cuda.ExternalStream(stream.cuda_stream):
        cupy.RawKernel(SOURCES[tool], "fault")((1,), (128,), (int(memory),))
    stream.synchronize()


if __name__ == "__main__":
    run(sys.argv[1])
