"""Traces made by hand, in the form in which torch 2.13 writes them for Chrome."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pykern.plan import Timeline

CALLER, AUTOGRAD = 4711, 4712


class Trace:
    """The events of a trace of one process, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": CALLER, "tid": 0, "ts": 0, "args": {}},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "T",
             "ts": 0, "dur": 1e9, "args": {"Op count": 0}},
        ]  # fmt: skip
        self._now = 10.0
        self._num_calls = 0

    def add(self, category: str, name: str, start: float, end: float, **more: Any) -> None:
        """An event with a beginning and an end, by the caller if nothing else is said."""
        event = {"ph": "X", "cat": category, "name": name, "pid": CALLER, "tid": CALLER}
        times = {"ts": start, "dur": end - start}
        self.events.append(event | times | {"args": {"External id": len(self.events)}} | more)

    def range(self, text: str, start: float, end: float, **more: Any) -> None:
        """A range of pykern's."""
        self.add("cpu_op", f"pykern {text}", start, end, **more)

    def launched(self, category: str, span: tuple[float, float]) -> None:
        """Work of a graph, of whose launch there is the range around alone: the last event's."""
        ids = {"External id": self.events[-1]["args"]["External id"], "correlation": 1 << 20}
        self.events.insert(0, {"ph": "X", "cat": category, "name": "a_kernel", "pid": 0, "tid": 7,
                               "ts": span[0], "dur": span[1] - span[0], "args": ids})  # fmt: skip

    def work(self, category: str, called: float, span: tuple[float, float], **more: Any) -> None:
        """A kernel or a copy on a GPU, the call that issued it, and the flow from that to this."""
        self._num_calls += 1
        args: dict[str, Any] = {"args": {"correlation": self._num_calls, "device": 0, "stream": 7}}
        self.add("cuda_runtime", "cudaLaunchKernel", called, called + 0.01, **args, **more)
        self.add(category, "a_kernel", span[0], span[1], pid=0, tid=7, **args)
        flow = {"cat": "ac2g", "name": "ac2g", "id": self._num_calls, "pid": CALLER, "tid": CALLER}
        self.events.append(flow | {"ph": "s", "ts": called})

    def steps(self, timelines: Iterable[Timeline], *, told: bool = False) -> None:
        """Steps of workers, one after another. `told`: by the caller, at the end of a step."""
        for timeline in timelines:
            begin, long = self._now, timeline.makespan_ns / 1e3
            self.range("step", begin, begin + long + 4)
            for device, row in enumerate(timeline.rows):
                for span in row:
                    action, ns = span.action, span.end_ns - span.start_ns
                    text = f"{action.kind.name} s{action.stage} mb{action.microbatch} dev{device}"
                    if told:
                        text += f" at {span.start_ns:.0f} for {ns:.0f} ns"
                        self.range(text, begin + long + 2, begin + long + 2.1)
                    else:
                        at = begin + 1 + span.start_ns / 1e3
                        self.range(text, at, at + ns / 1e3, tid=AUTOGRAD + device)
            self._now += long + 10

    def save(self, path: Path) -> Path:
        """Writes the trace, and returns its path."""
        trace = {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": self.events}
        path.write_text(json.dumps(trace))
        return path
