"""The rows of docs/gpus.md on the sections of the kept session: a sentence on the figures of each.

Figures come from the results. Words beside them say only that which the section checks itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_MIB = 2**20


def _tests(of: Any) -> str:
    (passed,) = re.findall(r"(\d+) passed", of["summary"])
    return (
        f"{passed} passed: every schedule with the bits of the plain model, on four streams and on "
        "four groups of SMs; graphs per action and per step; recompute, dropout, recorded models, "
        "shared weights, failures; eight fused operations in bfloat16, compared with plain torch "
        "in bfloat16, dropout by its share alone"
    )


def _stitch(of: Any) -> str:
    return (
        "two graphs and a copy between them, stitched into one graph, give the same bits and take "
        f"{of['at_once_us']:.1f} µs to issue, one by one {of['by_action_us']:.1f}"
    )


def _pools(of: Any) -> str:
    own, shared = of["per_slot"], of["shared"]
    return (
        "slots that share a pool corrupt activations, and slots with their own do not; "
        f"{own['bytes_per_slot'] / _MIB:.0f} MiB a slot in place of "
        f"{shared['bytes_per_slot'] / _MIB:.0f}, and {own['capture_ms_per_graph']:.1f} ms to "
        "capture a graph"
    )


def _green(of: Any) -> str:
    sizes = " or ".join(str(split["multiprocessors"][0]) for split in of.values())
    return (
        f"groups of {sizes} SMs have no SM in common; a graph keeps the group of its capture, also "
        "when it is launched on another stream; events of the primary context may be recorded on "
        "streams of groups"
    )


def _first_hour(of: Any) -> str:
    return (
        "`doctor`, `topo`, `verify`, `demo`, `profile`, `tune` and `bench box` end well, side by "
        f"side in {max(of.values()):.0f} s"
    )


def _driver_log(of: Any) -> str:
    calls = sorted(log["replayed"] for log in of.values())
    return (
        f"{calls[0]:,} to {calls[-1]:,} calls of the driver, called, captured and as one graph: "
        "the same calls as on the fake driver, which gives each the same result and sees no access "
        "without an order"
    )


def _sanitizer(of: Any) -> str:
    errors = sum(tool["errors"] for tool in of.values())
    return (
        f"memcheck and racecheck of compute-sanitizer: {errors or 'no'} errors, on streams and on "
        "groups, called, by graphs and as one graph"
    )


def _graph_step(of: Any) -> str:
    ms = {row["contender"]: row["median_ms"] for row in of["records"]}
    return (
        "a step of a GPT (8 blocks, width 1024, 8 microbatches of 2 rows of 512 tokens) on four "
        f"streams: {ms['pykern step']:.1f} ms as one graph, {ms['pykern graph']:.1f} with a graph "
        f"per action, {ms['graphed']:.1f} for the plain model captured whole; "
        f"{ms['pykern eager']:.0f} called from Python, {ms['pykern threads']:.0f} issued by four "
        f"threads, {ms['plain loop']:.0f} for the plain loop, which wait for Python"
    )


def _action_cpu(of: Any) -> str:
    us = {name: of[name]["us_per_action"] for name in ("step", "graph", "eager", "plain loop")}
    loop = us["plain loop"]
    return (
        "CPU time to issue an action of a stage that hardly computes: "
        f"{us['step']:.1f} µs as one graph, {us['graph']:.1f} by a graph per action, "
        f"{us['eager']:.0f} called, {loop:.0f} for the same share of a plain loop, so "
        f"{us['step'] / loop:.2f}, {us['graph'] / loop:.2f} and {us['eager'] / loop:.1f} times as "
        f"much as the loop; by four threads {of['threads']['wall_us_per_action']:.0f} µs pass for "
        "each action"
    )


def _issue_rate(of: Any) -> str:
    one, two, most = (of[f"threads {number}"] for number in (1, 2, 8))
    return (
        f"two threads that issue a tiny model at the same time issue {two / one:.1f} times as many "
        f"steps a second as one, and eight {most / one:.1f} times"
    )


def _copy_overlap(of: Any) -> str:
    shares = (
        100 * of["streams"][way]["share_while_sender_or_receiver_computes"]
        for way in ("eager", "graph")
    )
    called, by_graphs = shares
    return (
        f"copies of {of['message_bytes'] / _MIB:.0f} MiB between stages, 1F1B: {called:.0f} % of "
        "their time passes while the sender or the receiver computes, "
        f"{by_graphs:.0f} % by graphs"
    )


def _driver_costs(of: Any) -> str:
    us = of["us"]
    return (
        f"an event recorded {us['cuEventRecord']:.1f} µs or waited for "
        f"{us['cuStreamWaitEvent']:.1f}, a copy {us['cuMemcpyAsync']:.1f}, a graph launch "
        f"{us['cuGraphLaunch, nodes 1']:.1f} for one node and "
        f"{us['cuGraphLaunch, nodes 1000']:.1f} for a thousand"
    )


def _words(text: str) -> Callable[[Any], str]:
    return lambda _: text


SEEN: Mapping[str, Callable[[Any], str]] = {
    "tests": _tests,
    "raw_launch": _words("launches of the driver give the bits of torch's replay"),
    "split_capture": _words("graphs of F, I and W add up gradients in place"),
    "capture_copy": _words("a copy between two graphs holds"),
    "stitch": _stitch,
    "pools": _pools,
    "green": _green,
    "profiler": _words("torch's profiler names the kernels of raw graph launches"),
    "first_hour": _first_hour,
    "driver_log": _driver_log,
    "watch": _words(
        "a kernel that hangs in stage 2 is reported by stage, microbatch and action, on streams "
        "and on groups, called, by graphs and in one graph"
    ),
    "sanitizer": _sanitizer,
    "graph_step": _graph_step,
    "action_cpu": _action_cpu,
    "issue_rate": _issue_rate,
    "copy_overlap": _copy_overlap,
    "driver_costs": _driver_costs,
    **dict.fromkeys(("kernels", "levels", "makespan"), _words("tables below")),
}
