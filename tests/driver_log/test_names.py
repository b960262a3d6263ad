"""Names in the place of addresses."""

from bench.driver_log.names import named
from bench.driver_log.steps import calls_of_step

RAW = """\
1 cuCtxGetCurrent *ctx@0 = 0
1 cuDevicePrimaryCtxRetain *ctx@aa0 0 = 0
1 cuEventCreate *event@bb0 2 = 0
1 cuEventDestroy event@bb0 = 0
1 cuEventCreate *event@bb0 2 = 0
1 cuCtxGetCurrent *ctx@aa0 = 0
1 step 3
1 work addmm stream@0 r buffer@1010:8 w buffer@2000:16
1 cuMemcpyAsync buffer@3000 buffer@1000 32 stream@cc0 = 0
1 cuGraphAddMemcpyNode *node@1 graph@2 () copy(buffer@3010,buffer@2008,32) ctx@aa0 = 0
1 cuGraphAddChildGraphNode *node@3 graph@2 (node@1) graph@4 = 0
1 update
"""

NAMED = """\
buffers 32 40 48
1 cuCtxGetCurrent *ctx0 = 0
1 cuDevicePrimaryCtxRetain *ctx1 0 = 0
1 cuEventCreate *event1 2 = 0
1 cuEventDestroy event1 = 0
1 cuEventCreate *event2 2 = 0
1 cuCtxGetCurrent *ctx1 = 0
1 step 3
1 work addmm stream0 r buffer1+16:8 w buffer2+0:16
1 cuMemcpyAsync buffer3+0 buffer1+0 32 stream1 = 0
1 cuGraphAddMemcpyNode *node1 graph1 () copy(buffer3+16,buffer2+8,32) ctx1 = 0
1 cuGraphAddChildGraphNode *node2 graph1 (node1) graph2 = 0
1 update
"""


def test_objects_and_bytes_have_names_in_their_order() -> None:
    assert named(RAW) == NAMED


def test_calls_of_a_step_are_without_bytes() -> None:
    assert calls_of_step(NAMED) == [
        "1 cuMemcpyAsync stream1",
        "1 cuGraphAddMemcpyNode *node1 graph1 () ctx1",
        "1 cuGraphAddChildGraphNode *node2 graph1 (node1) graph2",
    ]
