"""Pipeline-parallel runtime for PyTorch in one process."""
