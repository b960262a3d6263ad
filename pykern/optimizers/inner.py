"""What the groups of two optimizers have alike."""

from typing import Any


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """All of a group but its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
