"""The demo: a byte-level GPT trained on text by a pipeline of CPU workers, start to finish."""
