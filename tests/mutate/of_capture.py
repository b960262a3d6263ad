"""Faults in graph mode: what is captured, when, and what replays read."""

from .mutant import mutants, of_runtime

CAPTURE = of_runtime(
    "capture", "capture_held", "capture_changes", "capture_batches", "capture_seeds", "skips"
)
REPLAYS = of_runtime("capture")
HELD = of_runtime("capture_held", "capture_changes")
CHANGES = of_runtime("capture_changes", "capture")
CONTENTS = of_runtime("contents", "capture_changes")
SEEDS = of_runtime("capture_seeds")
STEPS = of_runtime("streams")
TURNS = of_runtime("recompute_gpus")
# Where graphs have memory that torch's allocator hands out.
ORACLE = ("tests/device_oracle/captures_on_gpus.py",)

OF_CAPTURE = (
    *mutants(
        "pykern/runtime/gpu/streams.py",
        CAPTURE,
        ('self._capture == "step" and not traced', 'self._capture == "step"'),
        ('if self._capture == "step" and not traced:', "if False:"),
        ("        recording.load(batch)\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/streams.py",
        STEPS,
        ("            gpus.synchronize()", "            pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/recording.py",
        CAPTURE,
        ("gradient.copy_(parameter.grad)", "pass"),
        ("            parameter.grad = gradient\n        # torch fills", "        # torch fills"),
        ("torch._foreach_zero_(on_one)", "pass"),
        ("static.copy_(value, non_blocking=True)", "pass"),
        ("        self._load_seeds()\n", ""),
        ("        step.use()\n", ""),
        ("            self._record(Kind.R, stage, slot, pool)\n", ""),
        ("        self._refuse_others(stage, slot)\n", ""),
        ("after = [transfer_to(self._loss_of[number], loss)]", "pass"),
        ("self._send(Kind.COPY_F, stage, number, static.outputs[slot])", "pass"),
        ("self._send(Kind.COPY_B, stage, number, made)", "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/recording.py",
        ORACLE,
        ("shared=self._pools[stage].are_shared", "shared=False"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/recording.py",
        CAPTURE,
        ("after = self._give_gradients(stage, slot, number)", "pass"),
        (
            "ring.host((kind, slot, index), size)",
            "ring.host((kind, 0, index), size)",
            "Copies of a kind to a stage have one stream, which waits until each has landed.",
        ),
        ("        if self._lane_of[reader] == self._lane_of[stage]:\n            return\n", ""),
        ("        self._gpus.give_back_cache()\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/recording.py",
        REPLAYS,
        ("return self._static[stage].slot_of(number)", "return 0"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/recording.py",
        SEEDS,
        ("seeds.copy_(torch.stack(drawn), non_blocking=True)", "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/recording.py",
        REPLAYS,
        (
            "targets = all_tensors(self._target_parts[number])",
            "targets = all_tensors(self._target_parts[0])",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/cuda.py",
        ORACLE,
        ('warnings.filterwarnings("ignore", "The CUDA Graph is empty")', "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        CHANGES,
        ("            self._gpus.synchronize()\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        SEEDS,
        ("            if self._drew:", "            if self._must and self._drew:"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        REPLAYS,
        ("self.recording is not None and wanted == self._recorded", "self.recording is not None"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        HELD,
        ("        if held is not None:\n            raise held\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        REPLAYS,
        ("elif wanted == self._warm and wanted != self._refused:", "elif wanted != self._refused:"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        CHANGES,
        ("        if self._contents.changed() is not None:", "        if False:"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        HELD,
        (
            "now is not None and (now is not gradient or now._version != version)",
            "now is not None and now is not gradient",
        ),
        (
            "                self._refused, self._contents = wanted, Contents([])\n",
            "                pass\n",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        CHANGES,
        ("            self._changes = 0\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        HELD,
        ("raise held or error from", "raise error from"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        SEEDS,
        ("                stage.draws.know(facts)\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        CHANGES,
        ("            self._refused = None\n", "            pass\n"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        REPLAYS,
        ("            self._has_warned = True\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/policy.py",
        HELD,
        ("        self._gradients = []\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/pools.py",
        TURNS,
        ("return False", "pass"),
        ("in (Kind.B, Kind.W)", "in (Kind.B,)"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/pools.py",
        HELD,
        ("if each * more > free:", "if each > free:"),
        (
            "                reserved, free = self._gpus.room(lane)\n",
            "                reserved, free = before, 1\n",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/quiet.py",
        HELD,
        ("    gc.disable()\n", ""),
        ("torch.set_autocast_cache_enabled(False)", "pass"),
        ("torch.set_autocast_cache_enabled(was_enabled)", "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/static_stage.py",
        REPLAYS,
        ("where = (self.ring_slot(slot), Kind.F, len(places))", "where = (0, Kind.F, len(places))"),
        (
            "self._ring.place((self.ring_slot(slot), Kind.B, index), gradient)",
            "self._ring.place((0, Kind.B, index), gradient)",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/static_stage.py",
        SEEDS,
        ("with provided(self.seeds[slot]):", "with provided(self.seeds[0]):"),
        ('ring.place((slot, "seeds"), like)', 'ring.place((0, "seeds"), like)'),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/contents.py",
        CONTENTS,
        ("            or _hooks(self.tensors) != self.hooks\n", ""),
        ("            or _places(self.strided) != self.places\n", ""),
        ("            or _places(_mains(self.strided)) != self.mains\n", ""),
    ),
)
