"""Faults in random draws of actions, and in what an interceptor does."""

from .mutant import mutants, of_runtime

RANDOM = of_runtime("random", "draws_within")
TORCH = ("tests/project/test_intercepting.py",)

OF_DRAWS = (
    *mutants(
        "pykern/torch_private/intercepting.py",
        (*RANDOM, *TORCH),
        ("            and outer is None\n", ""),
        ("            and not kwargs\n", ""),
        ("0 < len(args) <= num_before", "0 < len(args)"),
        ("            and type(args[0]) is Tensor\n", ""),
        (
            "                include(key, True)\n        include",
            "                pass\n        include",
        ),
        ("            here.inner = mine\n", "            here.inner = inner\n"),
        ("        here.inner = outer\n", ""),
        ("        include(key, self._outer is not None)\n", "        include(key, False)\n"),
        ("            carry(self._outer)\n", "            pass\n"),
        ("            carry(self)\n", "            pass\n"),
        ("if own is None or not takes_generator(func, args, kwargs):", "if True:"),
        ("_come_along(func) if mine is None else mine", "mine"),
        ("(torch.cuda.is_initialized() or _scripts.get_functions())", "True"),
    ),
    *mutants(
        "pykern/torch_private/bare_layers.py",
        of_runtime("bare_layers"),
        ('    if "weight" in held or "bias" in held:\n', "    if False:\n"),
        ("        except KeyError:\n", "        except IndexError:\n"),
        ("            or inner._outer is not None\n", ""),
        ("            or type(input) is not Tensor\n", ""),
        ("            or has_torch_function_unary(input)\n", ""),
        ("            or input.is_nested\n", ""),
        ("            or layer.inplace\n", ""),
        ("            or not layer.training\n", ""),
        ("0 < layer.p < 1", "0 < layer.p"),
        ("0 < layer.p < 1", "layer.p < 1"),
        ("            include(key, True)\n", "            pass\n"),
        ("noise.div_(kept)", "noise"),
    ),
    *mutants(
        "pykern/runtime/random/known.py",
        RANDOM,
        (
            "        if not seed.is_used:\n            return OwnState",
            "        if False:\n            return OwnState",
        ),
        ("self._first.manual_seed(self._number), None", "self._first, None"),
        ("seed.of_stages.get(stage) or seed.of_stage(stage), index)", "seed.value(), index)"),
    ),
    *mutants(
        "pykern/runtime/random/eager.py",
        RANDOM,
        ("interceptor() if _own_generator(args, kwargs) is None else None", "None"),
    ),
    *mutants(
        "pykern/runtime/random/seed.py",
        RANDOM,
        ("with without_transforms(), _C.Undo", "with _C.Undo"),
    ),
    *mutants(
        "pykern/runtime/failures.py",
        of_runtime("failed_backward"),
        ("        failures.clear()\n", ""),
        ("            del first\n", "            pass\n"),
    ),
    *mutants(
        "pykern/runtime/microbatch.py",
        of_runtime("microbatch"),
        ("tensor.size(0) == rows[0] > 1", "tensor.size(0) == rows[0]"),
        ("    if isinstance(leaf, PLAIN):\n", "    if True:\n"),
    ),
    *mutants(
        "pykern/runtime/gpu/capture/refusals.py",
        of_runtime("capture_batches"),
        ("one.cut_tape if isinstance(one, Environment) else None", "None"),
    ),
    *mutants(
        "pykern/runtime/random/draws.py",
        RANDOM,
        ("watched = self.only_seeds or", "watched ="),
        ("len(self._whole) > 0 or not own", "not own"),
        ("len(self._whole) > 0 or not own", "len(self._whole) > 0"),
    ),
)
