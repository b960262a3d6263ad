"""Random numbers that are the same wherever and however often a forward runs."""
