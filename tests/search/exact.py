"""The shortest makespan of tiny instances, by trying every order."""

from __future__ import annotations

from dataclasses import dataclass

from pykern.plan import Costs


@dataclass(frozen=True)
class Instance:
    """Equal stages with a split backward; every number is whole.

    Attributes:
        device_of: The device of each stage.
        cap: Most microbatches times stages that a device holds, from F to the end of W.
        forwards_first: Whether no backward begins on a device before all its forwards have.
    """

    device_of: tuple[int, ...]
    num_microbatches: int
    forward: int
    gradient: int
    weight: int
    hop: int
    cap: int
    forwards_first: bool = False


def costs_of(instance: Instance) -> Costs:
    """The same times as the planner takes them."""
    return Costs(
        instance.forward,
        instance.gradient + instance.weight,
        instance.hop,
        input_ns=instance.gradient,
        weight_ns=instance.weight,
    )


def shortest(instance: Instance) -> int:
    """By depth first search over who runs what next, which reaches every semi-active schedule."""
    return _Solver(instance).solve()


class _Solver:
    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.num_stages = len(instance.device_of)
        self.best = 10**9
        self.seen: dict[object, list[tuple[int, ...]]] = {}

    def solve(self) -> int:
        num_devices = max(self.instance.device_of) + 1
        none = tuple(() for _ in range(self.num_stages))
        self._search(none, none, (0,) * self.num_stages, (0,) * num_devices)
        return self.best

    def _search(self, forwards, inputs, weights, clocks) -> None:
        count = self.instance.num_microbatches
        if all(done == count for done in weights):
            self.best = min(self.best, max(clocks))
            return
        if max(clocks) >= self.best or self._dominated(forwards, inputs, weights, clocks):
            return
        for stage, device in enumerate(self.instance.device_of):
            for kind, ready in self._ready(stage, forwards, inputs, weights):
                time = {"F": self.instance.forward, "I": self.instance.gradient}
                end = max(clocks[device], ready) + time.get(kind, self.instance.weight)
                ends = (*clocks[:device], end, *clocks[device + 1 :])
                if kind == "F":
                    self._search(_with(forwards, stage, end), inputs, weights, ends)
                elif kind == "I":
                    self._search(forwards, _with(inputs, stage, end), weights, ends)
                else:
                    more = (*weights[:stage], weights[stage] + 1, *weights[stage + 1 :])
                    self._search(forwards, inputs, more, ends)

    def _dominated(self, forwards, inputs, weights, clocks) -> bool:
        """Whether the same actions were reached with no time later; else remembers these."""
        key = (tuple(map(len, forwards)), tuple(map(len, inputs)), weights)
        times = (*clocks, *(end for ends in (*forwards, *inputs) for end in ends))
        others = self.seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in others):
            return True
        others.append(times)
        return False

    def _ready(self, stage, forwards, inputs, weights):
        done, back = len(forwards[stage]), len(inputs[stage])
        if done < self.instance.num_microbatches and self._has_room(stage, forwards, weights):
            if stage == 0:
                yield "F", 0
            elif len(forwards[stage - 1]) > done:
                yield "F", forwards[stage - 1][done] + self._hop(stage - 1)
        if self.instance.forwards_first and any(
            len(forwards[other]) < self.instance.num_microbatches for other in self._beside(stage)
        ):
            return
        if back < done:
            if stage == self.num_stages - 1:
                yield "I", 0
            elif len(inputs[stage + 1]) > back:
                yield "I", inputs[stage + 1][back] + self._hop(stage)
        if weights[stage] < back:
            yield "W", 0

    def _has_room(self, stage, forwards, weights) -> bool:
        held = (len(forwards[s]) - weights[s] for s in self._beside(stage))
        return sum(held) < self.instance.cap

    def _beside(self, stage) -> list[int]:
        """The stages of its device."""
        device_of = self.instance.device_of
        return [s for s in range(self.num_stages) if device_of[s] == device_of[stage]]

    def _hop(self, stage: int) -> int:
        """Between a stage and the next."""
        moves = self.instance.device_of[stage] != self.instance.device_of[stage + 1]
        return self.instance.hop if moves else 0


def _with(ends, stage, end):
    return (*ends[:stage], (*ends[stage], end), *ends[stage + 1 :])
