"""From what a user says of recompute to a level for each microbatch of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from .plan import Action, Kind, Plan
from .runtime.recompute import Level
