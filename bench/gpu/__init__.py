"""The sections of bench/gpu_session.py, one module each with a function run(folder) -> figures."""
