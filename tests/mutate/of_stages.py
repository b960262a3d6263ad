"""Faults in F and R of recomputed microbatches, and in the segments of recorded models."""

from .mutant import Mutant


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/runtime/test_{name}.py" for name in names)


LEVELS = _files("recompute_levels", "recompute_cells", "recompute")
CELLS = _files("recompute_cells", "recompute_changes")
RECORDED = (*_files("recorded"), "tests/trace/test_beside.py")
ON_GPUS = ("-n0", "tests/device_oracle/steps_on_gpus.py")

OF_STAGES = (
    Mutant(
        "pykern/runtime/stage/by_level.py",
        "            with recomputed.keeping(microbatch):\n",
        "            if True:\n",
        LEVELS,
    ),
    Mutant(
        "pykern/runtime/stage/by_level.py",
        "            stage.arguments[microbatch] = None\n",
        "",
        CELLS,
    ),
    Mutant(
        "pykern/runtime/stage/by_level.py", "holders, stage.draws.state)", "holders, None)", LEVELS
    ),
    Mutant(
        "pykern/runtime/stage/by_level.py",
        '[*stage.layers, getattr(stage.finish, "function", None)]',
        "stage.layers",
        LEVELS,
    ),
    Mutant(
        "pykern/runtime/stage/by_level.py",
        "len(stage.layers) - (stage.next is not None)",
        "len(stage.layers)",
        CELLS,
        harmless="The graph is cut once more behind the last layer, and the hand-over cuts it.",
    ),
    Mutant(
        "pykern/runtime/stage/by_level.py", "piece.stop <= num_cuts", "piece.stop < num_cuts", CELLS
    ),
    Mutant("pykern/runtime/stage/by_level.py", "        cell.require_same(outputs)\n", "", CELLS),
    Mutant(
        "pykern/trace/segment.py",
        "if parent._modules.get(name) is not self._modules[key_of(full_name)]:",
        "if False:",
        RECORDED,
    ),
    Mutant(
        "pykern/trace/segment.py",
        "self._parameters[key] = owner._parameters[name]",
        "self._parameters.setdefault(key, owner._parameters[name])",
        RECORDED,
    ),
    Mutant(
        "pykern/trace/segment.py",
        "here.device, index = segment.device, segment.index",
        "index = segment.index",
        ON_GPUS,
    ),
    Mutant(
        "pykern/trace/segment.py",
        "here.parameters, here.buffers = segment._parameters, segment._buffers",
        "here.parameters = segment._parameters",
        RECORDED,
    ),
    Mutant(
        "pykern/trace/segment.py",
        "            self._copied[key] = now\n",
        "",
        ON_GPUS,
    ),
    Mutant("pykern/trace/segment.py", " and then[1] == now[1]", "", ON_GPUS),
)
