"""Keeps settings that all threads share as they were before a step of several threads.

Two layers that change a setting for a block at the same time, as `with sdpa_kernel(...)` does, set
it back in any order: the later one may have found what the earlier one had set.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import _C
from ..torch_private import changed_settings, set_shared_settings, shared_settings
from ..user_code import warn
from .driver import Failure


def settings_kept(run: Callable[[], list[Failure]]) -> list[Failure]:
    """Runs a step; sets back what it leaves changed, with a warning if nothing has failed."""
    before = shared_settings()
    with _C.Undo(set_shared_settings, before):
        failures = run()
        changed = changed_settings(before)
    if changed and not failures:
        warn(
            f"layers changed {', '.join(changed)} while stages ran at the same time, which all "
            "threads share: other stages may have computed with it. It is as before the step "
            "again. Change it around the step, not in layers"
        )
    return failures
