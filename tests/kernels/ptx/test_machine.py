"""The interpreter of PTX, by texts that are written for it."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest

from tests.kernels.ptx.frame import Frame
from tests.kernels.ptx.limits import occupancy
from tests.kernels.ptx.machine import KernelFault, run
from tests.kernels.ptx.memory import Region, Space
from tests.kernels.ptx.parsed import UnknownPtx, parsed

HEAD = """
.version 8.7
.target sm_90a
.visible .entry small(
	.param .u64 .ptr .global .align 1 small_param_0,
	.param .u64 .ptr .global .align 1 small_param_1,
	.param .u32 small_param_2
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<99>;
	ld.param.b64 	%rd1, [small_param_0];
	ld.param.b64 	%rd2, [small_param_1];
	ld.param.b32 	%r9, [small_param_2];
	mov.u32 	%r1, %tid.x;
	mad.wide.s32 	%rd3, %r1, 4, %rd1;
	mad.wide.s32 	%rd4, %r1, 4, %rd2;
	shl.b32 	%r2, %r1, 2;
	mov.b32 	%r3, global_smem;
	add.s32 	%r4, %r3, %r2;
"""
INPUT, OUTPUT = 0x10000, 0x20000
THREADS = 64


def ran(
    body: str, values: np.ndarray, *, number: int = 0, blocks: int = 1
) -> tuple[Frame, np.ndarray]:
    """Runs a kernel that reads 32 bits for each thread, and writes 32 for each."""
    space = Space()
    read = Region(INPUT, values.view(np.uint8).copy(), "input")
    write = Region(OUTPUT, np.zeros(4 * THREADS * blocks, np.uint8), "output")
    read.written[:] = True
    for region in (read, write):
        region.allowed[:] = True
        space.regions.append(region)
    text = HEAD + body + "\nret;\n}"
    frame = Frame(parsed(text), (blocks, 1, 1), THREADS, 4 * THREADS, space)
    frame.arguments = {"small_param_0": INPUT, "small_param_1": OUTPUT, "small_param_2": number}
    run(frame)
    return frame, write.content.view(np.uint32)


def through(lines: str, values: np.ndarray, number: int = 0) -> np.ndarray:
    """The number that a thread makes of its %r5, in %r6."""
    body = f"ld.global.b32 %r5, [%rd3];\n{lines}\nst.global.b32 [%rd4], %r6;"
    return ran(body, values, number=number)[1]


def signed(x: int) -> int:
    """32 bits as a whole number with a sign."""
    return x - 2**32 * (x >> 31)


def halves_xor(x: int) -> int:
    """A number of 32 bits that depends on all 64."""
    return x >> 32 ^ x % 2**32


NUMBERS = np.random.default_rng(1).integers(0, 2**32, THREADS, dtype=np.uint32)
FLOATS = np.random.default_rng(2).standard_normal(THREADS).astype(np.float32)


@pytest.mark.parametrize(
    ("line", "exact"),
    [
        ("add.s32 %r6, %r5, -3;", lambda x: (x - 3) % 2**32),
        ("mul.hi.u32 %r6, %r5, 0xD2511F53;", lambda x: x * 0xD2511F53 >> 32),
        ("mul.lo.s32 %r6, %r5, -766435501;", lambda x: x * 0xD2511F53 % 2**32),
        ("shl.b32 %r6, %r5, 33;", lambda _: 0),
        ("shr.u32 %r6, %r5, 7;", lambda x: x >> 7),
        ("bfe.u32 %r6, %r5, 3, 5;", lambda x: x >> 3 & 31),
        ("bfe.s32 %r6, %r5, 0, 8;", lambda x: (x % 256 - 256 * (x >> 7 & 1)) % 2**32),
        ("prmt.b32 %r6, %r5, %r5, 0x0123U;", lambda x: int.from_bytes(x.to_bytes(4, "little"))),
        ("popc.b32 %r6, %r5;", lambda x: x.bit_count()),
        ("div.u32 %r6, %r5, 10;", lambda x: x // 10),
        ("rem.u32 %r6, %r5, 10;", lambda x: x % 10),
        ("rem.s32 %r6, %r5, 10;", lambda x: int(math.fmod(signed(x), 10)) % 2**32),
        ("mul.hi.s32 %r6, %r5, -7;", lambda x: (signed(x) * -7 >> 32) % 2**32),
        *[
            (
                f"mov.b64 %rd5, {{%r5, %r5}}; mul.hi.u64 %rd5, %rd5, {factor};"
                "mov.b64 {%r7, %r8}, %rd5; xor.b32 %r6, %r7, %r8;",
                lambda x, factor=factor: halves_xor(x * (2**32 + 1) * factor >> 64),
            )
            for factor in (2**64 - 1, 2935890503282001226, 2**32 - 1, 2**32 + 1)
        ],
        ("createpolicy.fractional.L2::evict_last.b64 %rd5, 1.0; mov.b32 %r6, %r5;", lambda x: x),
        (
            "mov.b32 {%rs1, %rs2}, %r5; mov.b32 %r6, {%rs2, %rs1};",
            lambda x: (x << 16 | x >> 16) % 2**32,
        ),
        ("setp.lt.s32 %p1, %r5, 0; selp.b32 %r6, 1, 2, %p1;", lambda x: 1 if x >> 31 else 2),
        (
            "setp.gt.u32 %p1, %r5, 5; mov.b32 %r6, 9; @!%p1 mov.b32 %r6, 8;",
            lambda x: 9 if x > 5 else 8,
        ),
        (
            "cvt.s8.s32 %rs1, %r5; cvt.u32.u16 %r6, %rs1;",
            lambda x: (x % 256 - 256 * (x >> 7 & 1)) % 2**16,
        ),
    ],
)
def test_whole_numbers_are_as_python_computes(line, exact):
    assert through(line, NUMBERS).tolist() == [exact(int(x)) for x in NUMBERS]


def test_fma_is_rounded_once():
    # In float64 the sum would lie between two float32, and a second rounding would go astray.
    a = np.float32(1 + 2**-12)
    c = np.float32(2**-54)
    body = f"fma.rn.f32 %r6, %r5, %r5, 0f{c.view(np.uint32):08X};"
    exact = 1 + 2**-11 + 2**-24
    found = through(body, np.full(THREADS, a)).view(np.float32)
    assert (found == np.nextafter(np.float32(exact - 2**-24), np.float32(2))).all()
    assert (through("mul.f32 %r6, %r5, %r5;", np.full(THREADS, a)).view(np.float32) == a * a).all()


def test_a_sum_is_rounded_down_where_it_is_asked_for():
    for constant in (2**-40, -(2**-40)):
        bits = np.float32(constant).view(np.uint32)
        body = f"fma.rm.ftz.f32 %r6, %r5, %r5, 0f{bits:08X};"
        found = through(body, FLOATS).view(np.float32)
        for x, y in zip(map(float, FLOATS), found, strict=True):
            exact = Fraction(x) * Fraction(x) + Fraction(constant)
            assert Fraction(float(y)) <= exact
            assert exact < Fraction(float(np.nextafter(y, np.float32(np.inf))))


def test_arithmetic_of_16_bits_is_rounded_once():
    # 1.5 * (1 + 2**-7) is the middle between 0x3FC1 and 0x3FC2. Less 2**-40 it is nearer to the
    # first, but a rounding to float32 would lead to the middle, and from there to the even one.
    body = "mov.b32 %r7, 0x3F813F81; mov.b32 %r8, 0xAB80AB80; fma.rn.bf16x2 %r6, %r5, %r7, %r8;"
    found = through(body, np.full(THREADS, 0x3FC03FC0, np.uint32))
    assert found.tolist() == [0x3FC13FC1] * THREADS
    product = through("mul.bf16x2 %r6, %r5, %r5;", np.full(THREADS, 0x3FC03F80, np.uint32))
    assert product.tolist() == [0x40103F80] * THREADS


@pytest.mark.parametrize(
    ("value", "kept"), [(-1.0, 0.0), (0.25, 0.25), (7.0, 1.0), (float("nan"), 0.0), (1e-40, 0.0)]
)
def test_a_saturated_number_is_from_0_to_1(value, kept):
    found = through("cvt.ftz.sat.f32.f32 %r6, %r5;", np.full(THREADS, value, np.float32))
    assert found.view(np.float32).tolist() == [kept] * THREADS


def test_whole_numbers_are_rounded_once_to_16_bits():
    # Just above the middle of two bfloat16, and of two float32.
    number = 2**24 + 2**16 + 1
    values = np.full(THREADS, number, np.uint32)
    found = through("cvt.rn.bf16.u32 %rs1, %r5; cvt.u32.u16 %r6, %rs1;", values)
    assert found.tolist() == [0x4B81] * THREADS


def test_hints_for_caches_change_no_value():
    lines = (
        "createpolicy.fractional.L2::evict_last.b64 %rd5, 1.0;"
        "ld.global.L1::evict_last.L2::cache_hint.b32 %r6, [%rd3], %rd5;"
    )
    assert through(lines, NUMBERS).tolist() == NUMBERS.tolist()


def test_floats_of_16_bits_are_rounded_to_nearest():
    import torch  # noqa: PLC0415

    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        line = f"cvt.rn.{kind}x2.f32 %r6, 0f3F800000, %r5;"
        halves = through(line, FLOATS).view(np.uint16).reshape(-1, 2)
        expected = torch.from_numpy(FLOATS).to(dtype).view(torch.uint16).numpy()
        assert (halves[:, 0] == expected).all()
        one = torch.ones(1, dtype=dtype).view(torch.uint16).numpy()
        assert (halves[:, 1] == one).all()


def test_a_loop_ends_for_each_thread_by_itself():
    body = """
	mov.b32 %r6, 0;
$L__BB0_1:
	add.s32 %r6, %r6, 1;
	setp.lt.u32 %p1, %r6, %r1;
	@%p1 bra $L__BB0_1;
	st.global.b32 [%rd4], %r6;
"""
    frame, result = ran(body, NUMBERS)
    assert result.tolist() == [1, *range(1, THREADS)]
    # Two warps go round as often as the last of their threads.
    assert frame.counts.opcodes["setp"] == 31 + 63


def test_counts_are_of_warps_and_of_sectors():
    wide = np.concatenate([NUMBERS] * 8)
    frame, _ = ran("ld.global.b32 %r6, [%rd3]; st.global.b32 [%rd4], %r6;", wide)
    counts = frame.counts
    assert (counts.loads, counts.stores, counts.loaded, counts.stored) == (2, 2, 256, 256)
    apart = "mad.wide.s32 %rd5, %r1, 32, %rd1; ld.global.b32 %r6, [%rd5];"
    assert ran(apart, wide)[0].counts.loaded == 32 * THREADS


def test_values_go_through_warps_and_blocks():
    body = """
	ld.global.b32 %r5, [%rd3];
	shfl.sync.bfly.b32 %r6, %r5, 16, 31, -1;
	st.shared.b32 [%r4], %r6;
	bar.sync 0;
	sub.s32 %r8, 63, %r1;
	shl.b32 %r8, %r8, 2;
	add.s32 %r8, %r8, %r3;
	ld.shared.b32 %r6, [%r8];
	st.global.b32 [%rd4], %r6;
"""
    expected = NUMBERS.reshape(2, 2, 16)[:, ::-1].reshape(-1)[::-1]
    assert (ran(body, NUMBERS)[1] == expected).all()


def test_matrices_are_transposed():
    body = """
	mad.wide.s32 %rd5, %r1, 4, %rd1;
	ld.global.b32 %r5, [%rd3];
	and.b32 %r10, %r1, 32;
	shl.b32 %r10, %r10, 2;
	and.b32 %r11, %r1, 7;
	shl.b32 %r11, %r11, 4;
	add.s32 %r12, %r10, %r11;
	add.s32 %r13, %r3, %r12;
	stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r13], {%r5};
	bar.sync 0;
	ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r6}, [%r13];
	st.global.b32 [%rd4], %r6;
"""
    found = ran(body, NUMBERS)[1].view(np.uint16).reshape(2, 8, 8)
    assert (found == NUMBERS.view(np.uint16).reshape(2, 8, 8).transpose(0, 2, 1)).all()


STORED = "st.shared.b32 [%r4], %r1;"
NEIGHBOUR = "xor.b32 %r5, %r2, 4; add.s32 %r5, %r5, %r3; ld.shared.b32 %r6, [%r5];"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r6, [%rd3+4];", "thread 63, address 0x10100: out of bounds"),
        ("ld.global.b32 %r6, [%rd3+2];", "thread 0, address 0x10002: not a multiple of 4 bytes"),
        ("ld.global.b32 %r6, [%rd4];", "thread 0, address 0x20000: read of output that nothing"),
        ("ld.shared.b32 %r6, [%r4];", "read of shared memory that nothing wrote"),
        ("ld.shared.b32 %r6, [%r2];", "out of bounds of shared memory"),
        (STORED + NEIGHBOUR, "race: read of shared memory beside a write"),
        (STORED + "bar.sync 0;" + NEIGHBOUR + STORED, "race: write of shared memory beside a read"),
        ("st.shared.b32 [%r3], %r1;", "race: two writes of shared memory"),
        ("st.global.b32 [%rd2], %r1;", "race: two writes of output"),
        ("setp.lt.u32 %p1, %r1, 40; @%p1 bar.sync 0;", "divergent barrier: thread 40 of block 0"),
        (
            "setp.lt.u32 %p1, %r1, 40; @%p1 shfl.sync.bfly.b32 %r6, %r1, 1, 31, -1;",
            "a warp exchanges values while some of its threads are elsewhere",
        ),
    ],
)
def test_faults_are_found(body, message):
    with pytest.raises(KernelFault, match=re.escape(message)):
        ran(body, NUMBERS)


def test_what_is_allowed_is_no_fault():
    # The same value by several threads, and reads behind a barrier.
    ran("mov.b32 %r5, 7; st.shared.b32 [%r3], %r5; bar.sync 0; ld.shared.b32 %r6, [%r3];", NUMBERS)
    ran(STORED + "bar.sync 0;" + NEIGHBOUR + "bar.sync 0;" + STORED, NUMBERS)


def test_blocks_are_ordered_by_nothing():
    body = "mov.b32 %r5, %ctaid.x; st.global.b32 [%rd4], %r5;"
    with pytest.raises(KernelFault, match="race: two writes of output"):
        ran(body, NUMBERS, blocks=2)


@pytest.mark.parametrize(
    "body",
    [
        "lg2.approx.f16 %r6, %r1;",
        "add.f32 %r6, %r77, %r1;",
        "bar.sync 1, 32;",
        "ld.global.L1::no_allocate.b32 %r6, [%rd3];",
        "add.s64 %rd5, %r1, %rd3;",
        "add.f64 %rd5, %rd1, %rd3;",
        "atom.global.add.u32 %r6, [%rd4], 1;",
        ".weird directive",
    ],
)
def test_what_is_unknown_is_not_passed_over(body):
    with pytest.raises(UnknownPtx):
        ran(body, NUMBERS)


def test_occupancy_is_that_of_the_tables():
    assert occupancy(90, 32, 0, 128) == 1
    assert occupancy(90, 255, 0, 128) == 8 / 64
    assert occupancy(80, 32, 100 << 10, 1024) == 32 / 64
    assert occupancy(120, 40, 0, 256) == 1
