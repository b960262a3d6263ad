"""Faults in F and R of recomputed microbatches, and in the segments of recorded models."""

from .mutant import mutants, of_runtime

LEVELS = of_runtime("recompute_levels", "recompute_cells", "recompute")
CELLS = of_runtime("recompute_cells", "recompute_changes")
RECORDED = (*of_runtime("recorded"), "tests/trace/test_beside.py")
ON_GPUS = ("-n0", "tests/device_oracle/steps_on_gpus.py")

FAILED = of_runtime("failed_backward")

OF_STAGES = (
    *mutants(
        "pykern/runtime/stage/backward.py",
        FAILED,
        ("            let_go()\n            raise\n", "            raise\n"),
        ("        let_go()\n        raise\n\n\ndef", "        raise\n\n\ndef"),
    ),
    *mutants(
        "pykern/runtime/stage/stage.py",
        of_runtime("skips"),
        ("values = env.values.copy()", "values = env.values"),
        ("            arguments = (Environment(env.cut_tape, values),)\n", ""),
    ),
    *mutants(
        "pykern/runtime/stage/stage.py",
        of_runtime("in_place"),
        (
            "            self.copies_input = self.looks_at_copies = self._in_place\n",
            "            pass\n",
        ),
    ),
    *mutants(
        "pykern/runtime/stage/in_place.py",
        of_runtime("in_place"),
        ("stage.copies_input = any(", "stage.copies_input = True or any("),
        ("        stage.looks_at_copies = False\n", ""),
        ("        if any([one.is_inference() for one, _ in made]):\n", "        if False:\n"),
    ),
    *mutants(
        "pykern/runtime/autograd/landing.py",
        FAILED,
        ("        let_go()\n        raise\n", "        raise\n"),
    ),
    *mutants(
        "pykern/runtime/stage/by_level.py",
        LEVELS,
        ("            with recomputed.keeping(microbatch):\n", "            if True:\n"),
    ),
    *mutants(
        "pykern/runtime/stage/by_level.py",
        of_runtime("recompute_draws"),
        ("        if type(kept) is tuple:\n", "        if False:\n"),
        ("        with repeat(begins):\n", "        if True:\n"),
    ),
    *mutants(
        "pykern/runtime/random/eager.py",
        of_runtime("recompute_draws"),
        ("            self._is_fresh = False\n", ""),
        ("begin.generator.manual_seed(begin.seed)", "begin.generator"),
    ),
    *mutants(
        "pykern/runtime/stage/by_level.py",
        CELLS,
        ("            stage.arguments[microbatch] = None\n", ""),
    ),
    *mutants(
        "pykern/runtime/stage/by_level.py",
        LEVELS,
        ("loss_fn, stage.draws.state)", "loss_fn, None)"),
        ("given, stage.layers, loss_fn, stage", "given, stage.layers, None, stage"),
    ),
    *mutants(
        "pykern/runtime/recompute/watch.py",
        CELLS,
        (
            "last and is_last",
            "last",
            "The graph is cut once more behind the last layer, and the hand-over cuts it.",
        ),
        ("last and is_last", "False"),
    ),
    *mutants(
        "pykern/runtime/recompute/buffers.py",
        of_runtime("recompute_changes"),
        ("if place in found or place[0] in uncounted]", "if place in found]"),
    ),
    *mutants(
        "pykern/runtime/stage/one_graph_of_values.py",
        of_runtime("recompute_values"),
        ("            if is_cut:\n", "            if False:\n"),
        ("        if writes != _writes_to(", "        if False and writes != _writes_to("),
        ("        if (now := described(outputs)) != before:\n", "        if False:\n"),
        ("            recomputed.require_left_alone(needs)\n", "            pass\n"),
        ("env.values.copy()", "env.values"),
        ("leaf = leaves.get(id(before))", "leaf = None"),
    ),
    *mutants(
        "pykern/runtime/stage/one_graph.py",
        CELLS,
        ("            if is_cut:\n", "            if False:\n"),
        ("        if now != before:\n", "        if False:\n"),
        ("        if writes is not None and writes", "        if False and writes"),
        (
            "            recomputed.require_left_alone((argument.requires_grad,))\n",
            "            pass\n",
        ),
    ),
    *mutants(
        "pykern/runtime/stage/straight_tape.py",
        of_runtime("straight_tape"),
        ("    if len(cut_tapes) != 1:\n", "    if not cut_tapes:\n"),
        (" leaves[microbatch] = *leaves[microbatch], *mine", " pass"),
        (
            "return tuple([value for value in values if value.requires_grad])",
            "return tuple(values)",
        ),
    ),
    *mutants(
        "pykern/runtime/stage/straight_tape.py",
        of_runtime("skips"),
        ("        tests.append(f", "        str(f"),
    ),
    *mutants(
        "pykern/trace/whole_stage.py",
        of_runtime("straight_tape"),
        ("for n in self._cut_tape.copied[piece]]", "for n in []]"),
    ),
    *mutants(
        "pykern/trace/state_reader.py",
        ("tests/trace/test_state_reader.py",),
        ("for name in held if name in self._names}", "for name in held}"),
        ("            self._add(type(module), names)\n", ""),
        ("        if state != self._last:\n", "        if True:\n"),
        ("(held.get(key[1]), {}, _DEPTH)", "(held.get(key[1]), found, _DEPTH)"),
        ("                    self._places.pop(key, None)\n", "                    pass\n"),
        ("found = {name: getattr(value, name, None) for name in slots}", "found = {}"),
        ("return type(value) if is_container else Same(value), inside", "return inside"),
    ),
    *mutants(
        "pykern/trace/crossings.py",
        ("tests/trace/test_own_calls.py",),
        ("                parameter.data = data\n", "                pass\n"),
        ("found.append(Crossing(number, reader, text))", "pass"),
        ("[*module.named_parameters(target), *module.named_buffers(target)]", "[]"),
    ),
    *mutants(
        "pykern/trace/calls.py",
        ("tests/trace/test_own_calls.py",),
        ('return {kind for kind in kinds if "__call__" in vars(kind)}', "return {torch.nn.Module}"),
        ("            setattr(*place, _before[place])\n", ""),
    ),
    *mutants(
        "pykern/trace/recorded_often.py",
        ("tests/trace/test_recorded_often.py",),
        ("if batch == before + 1 else 1", "if batch else 1"),
        (" or self._has_warned:", ":"),
        ("if before[0] != now[0]:", "if True:"),
    ),
    *mutants(
        "pykern/trace/code_names.py",
        ("tests/trace/test_state_reader.py",),
        ("if function.__module__ == type(module).__module__:", "if False:"),
        ("        thing = thing.fget\n", "        return\n"),
        ('if step.opname == "LOAD_GLOBAL"', "if step.argval in code.co_names"),
        ("[content_of(cell) for cell in function.__closure__ or ()]", "[]"),
        ("        elif isinstance(constant, tuple | frozenset):\n", "        elif False:\n"),
    ),
    *mutants(
        "pykern/trace/origins.py",
        ("tests/trace/test_moving_averages.py",),
        ("        forget({})\n", ""),
        ("_C.Undo(forget, before)", "_C.Undo(id, before)"),
    ),
    *mutants(
        "pykern/trace/segment.py",
        RECORDED,
        ("if parent._modules.get(name) is not self._modules[key_of(full_name)]:", "if False:"),
        (
            "self._parameters[key] = owner._parameters[name]",
            "self._parameters.setdefault(key, owner._parameters[name])",
        ),
    ),
    *mutants(
        "pykern/trace/segment.py",
        ON_GPUS,
        ("self._buffers, self.device)", "self._buffers, None)"),
    ),
    *mutants(
        "pykern/trace/segment.py",
        RECORDED,
        ("values, self._parameters, self._buffers,", "values, self._parameters, {},"),
    ),
    *mutants(
        "pykern/trace/segment.py",
        ON_GPUS,
        ("            self._copied[key] = buffer, version_of(buffer)\n", ""),
        (" and version_of(buffer) == version", ""),
    ),
)
