"""Parts of a step beside its actions."""
