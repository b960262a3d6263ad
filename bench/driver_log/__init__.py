"""Every call that pykern makes of the CUDA driver, written down: a log that can be replayed."""
