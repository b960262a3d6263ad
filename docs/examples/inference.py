"""Inference over a stream of batches: no device waits for the end of a batch.

    python docs/examples/inference.py

On GPUs, with a larger model:

    python docs/examples/inference.py --devices cuda --layers 32 --width 2048 --batch 64

Weights come from a file that a program without pykern may have written (--weights).

Expected output (the seconds differ between machines):

    185 rows in 2.11 s
    equal to the model alone: True
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import pykern


def texts(count: int, batch: int, length: int) -> Iterator[Tensor]:
    """Batches of token ids, the last one smaller; a loader of yours may be without end."""
    source = torch.Generator().manual_seed(0)
    for number in range(count):
        rows = batch if number < count - 1 else batch // 2 + 1
        yield torch.randint(256, (rows, length), generator=source)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    defaults = {"layers": 4, "width": 128, "heads": 4, "length": 64, "batch": 16}
    defaults |= {"batches": 12, "microbatches": 2}
    for name, value in (defaults | {"devices": "cpu:2"}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--weights", type=Path, help="of torch.save; random by default")
    parser.add_argument("--out", type=Path, default=Path("inference.pt"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    asked = parse(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the workers of the pipeline use the other cores
    model = pykern.models.gpt(
        vocab=256,
        layers=asked.layers,
        width=asked.width,
        heads=asked.heads,
        context=asked.length,
    )
    if asked.weights:
        model.load_state_dict(torch.load(asked.weights))
    pipe = pykern.Pipeline(
        model, devices=asked.devices, schedule="forward_only", microbatches=asked.microbatches
    )
    pipe.eval()

    found = []
    start = time.perf_counter()
    # At any time a few batches are in flight, and one output is in your hands.
    with torch.inference_mode():
        for logits in pipe.stream(texts(asked.batches, asked.batch, asked.length)):
            likeliest = logits[:, -1].argmax(-1).cpu()
            found.append(likeliest)
    print(f"{sum(map(len, found))} rows in {time.perf_counter() - start:.2f} s")
    pipe.close()

    torch.save(torch.cat(found), asked.out)
    with torch.inference_mode():
        model.cpu()
        batches = texts(asked.batches, asked.batch, asked.length)
        alone = torch.cat([model(ids)[:, -1].argmax(-1) for ids in batches])
    print(f"equal to the model alone: {torch.equal(torch.load(asked.out), alone)}")


if __name__ == "__main__":
    main()
