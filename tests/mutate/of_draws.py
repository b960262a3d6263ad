"""Faults in random draws of actions, and in what an interceptor does."""

from .mutant import mutants, of_runtime

RANDOM = of_runtime("random")
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
            "                _include(_key, True)\n        _include",
            "                pass\n        _include",
        ),
        ("            _here.inner = mine\n", "            _here.inner = inner\n"),
        ("        _here.inner = outer\n", ""),
        ("        _include(_key, self._outer is not None)\n", "        _include(_key, False)\n"),
        ("            carry(self._outer)\n", "            pass\n"),
        ("            carry(self)\n", "            pass\n"),
        ("_carried(_NAME) if mine is None else mine", "mine"),
        ("if not _carry and torch.cuda.is_initialized():", "if not _carry:"),
    ),
    *mutants(
        "pykern/runtime/random/eager.py",
        RANDOM,
        (
            "        if not seed.is_used:\n            return OwnState",
            "        if False:\n            return OwnState",
        ),
        ("        self._first.manual_seed(", "        id("),
        ("seed.of_stages.get(stage) or seed.of_stage(stage), index))", "seed.value(), index))"),
    ),
    *mutants(
        "pykern/runtime/random/draws.py",
        RANDOM,
        ("watched = self.only_seeds or", "watched ="),
        ("len(self._whole) > 0 or not own", "not own"),
        ("len(self._whole) > 0 or not own", "len(self._whole) > 0"),
    ),
)
