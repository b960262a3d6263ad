"""Faults in graph mode: what is captured, when, and what replays read."""

from .mutant import Mutant


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/runtime/test_{name}.py" for name in names)


CAPTURE = _files(
    "capture", "capture_held", "capture_changes", "capture_batches", "capture_seeds", "skips"
)
REPLAYS = _files("capture")
HELD = _files("capture_held", "capture_changes")
CHANGES = _files("capture_changes", "capture")
CONTENTS = _files("contents", "capture_changes")
SEEDS = _files("capture_seeds")
STEPS = _files("streams")
TURNS = _files("recompute_gpus")
# Where graphs have memory that torch's allocator hands out.
ORACLE = ("tests/device_oracle/captures_on_gpus.py",)

OF_CAPTURE = (
    Mutant(
        "pykern/runtime/gpu/streams.py",
        'self._capture == "step" and not traced',
        'self._capture == "step"',
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/streams.py",
        'if self._capture == "step" and not traced:',
        "if False:",
        CAPTURE,
    ),
    Mutant("pykern/runtime/gpu/streams.py", "        recording.load(batch)\n", "", CAPTURE),
    Mutant(
        "pykern/runtime/gpu/streams.py",
        "            gpus.synchronize()",
        "            pass",
        STEPS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py", "gradient.copy_(parameter.grad)", "pass", CAPTURE
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "            parameter.grad = gradient\n        # torch fills",
        "        # torch fills",
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py", "torch._foreach_zero_(on_one)", "pass", CAPTURE
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "static.copy_(value, non_blocking=True)",
        "pass",
        CAPTURE,
    ),
    Mutant("pykern/runtime/gpu/capture/recording.py", "        self._load_seeds()\n", "", CAPTURE),
    Mutant("pykern/runtime/gpu/capture/recording.py", "        step.use()\n", "", CAPTURE),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "            self._record(Kind.R, stage, slot, pool)\n",
        "",
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "        self._refuse_others(stage, slot)\n",
        "",
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "after = [transfer_to(self._loss_of[number], loss)]",
        "pass",
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "self._send(Kind.COPY_F, stage, number, static.outputs[slot])",
        "pass",
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "self._send(Kind.COPY_B, stage, number, made)",
        "pass",
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "shared=self._pools[stage].are_shared",
        "shared=False",
        ORACLE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "after = self._give_gradients(stage, slot, number)",
        "pass",
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "ring.host((kind, slot, index), size)",
        "ring.host((kind, 0, index), size)",
        CAPTURE,
        harmless="Copies of a kind to a stage have one stream, which waits until each has landed.",
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "        if self._lane_of[reader] == self._lane_of[stage]:\n            return\n",
        "",
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "        self._gpus.give_back_cache()\n",
        "",
        CAPTURE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "return self._static[stage].slot_of(number)",
        "return 0",
        REPLAYS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "seeds.copy_(torch.stack(drawn), non_blocking=True)",
        "pass",
        SEEDS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/recording.py",
        "targets = all_tensors(self._target_parts[number])",
        "targets = all_tensors(self._target_parts[0])",
        REPLAYS,
    ),
    Mutant(
        "pykern/runtime/gpu/cuda.py",
        'warnings.filterwarnings("ignore", "The CUDA Graph is empty")',
        "pass",
        ORACLE,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "            self._gpus.synchronize()\n",
        "",
        CHANGES,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "            if self._drew:",
        "            if self._must and self._drew:",
        SEEDS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "self.recording is not None and wanted == self._recorded",
        "self.recording is not None",
        REPLAYS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "        if held is not None:\n            raise held\n",
        "",
        HELD,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "elif wanted == self._warm and wanted != self._refused:",
        "elif wanted != self._refused:",
        REPLAYS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "        if self._contents.changed() is not None:",
        "        if False:",
        CHANGES,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "now is not None and (now is not gradient or now._version != version)",
        "now is not None and now is not gradient",
        HELD,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "                self._refused, self._contents = wanted, Contents([])\n",
        "                pass\n",
        HELD,
    ),
    Mutant("pykern/runtime/gpu/capture/policy.py", "            self._changes = 0\n", "", CHANGES),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py", "raise held or error from", "raise error from", HELD
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "                stage.draws.know(facts)\n",
        "",
        SEEDS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py",
        "            self._refused = None\n",
        "            pass\n",
        CHANGES,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/policy.py", "            self._has_warned = True\n", "", REPLAYS
    ),
    Mutant("pykern/runtime/gpu/capture/policy.py", "        self._gradients = []\n", "", HELD),
    Mutant("pykern/runtime/gpu/capture/pools.py", "return False", "pass", TURNS),
    Mutant("pykern/runtime/gpu/capture/pools.py", "in (Kind.B, Kind.W)", "in (Kind.B,)", TURNS),
    Mutant("pykern/runtime/gpu/capture/quiet.py", "    gc.disable()\n", "", HELD),
    Mutant(
        "pykern/runtime/gpu/capture/quiet.py",
        "torch.set_autocast_cache_enabled(False)",
        "pass",
        HELD,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/quiet.py",
        "torch.set_autocast_cache_enabled(was_enabled)",
        "pass",
        HELD,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/static_stage.py",
        "where = (self.ring_slot(slot), Kind.F, len(places))",
        "where = (0, Kind.F, len(places))",
        REPLAYS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/static_stage.py",
        "self._ring.place((self.ring_slot(slot), Kind.B, index), gradient)",
        "self._ring.place((0, Kind.B, index), gradient)",
        REPLAYS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/static_stage.py",
        "with provided(self.seeds[slot]):",
        "with provided(self.seeds[0]):",
        SEEDS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/static_stage.py",
        'ring.place((slot, "seeds"), like)',
        'ring.place((0, "seeds"), like)',
        SEEDS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/contents.py",
        "            or _hooks(self.tensors) != self.hooks\n",
        "",
        CONTENTS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/contents.py",
        "            or _places(self.strided) != self.places\n",
        "",
        CONTENTS,
    ),
    Mutant(
        "pykern/runtime/gpu/capture/contents.py",
        "            or _places(_mains(self.strided)) != self.mains\n",
        "",
        CONTENTS,
    ),
)
