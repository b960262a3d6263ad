"""Communication of a pipeline's processes: groups, messages and checks of agreement."""
