"""LoRA with peft: a frozen base in a pipeline, adapters that train, are saved, loaded and merged.

    python docs/examples/lora.py

On GPUs, with a larger base:

    python docs/examples/lora.py --devices cuda --layers 32 --width 4096 --heads 32 --rank 16

Expected output (last digits differ between machines):

    base: loss 0.005, counts [5, 6, 7, 8, 9, 10, 11, 12]
    14336 of 186944 parameters train
    adapters: loss 0.167, counts [5, 7, 9, 11, 13, 15, 17, 19]
    without pykern: counts [5, 7, 9, 11, 13, 15, 17, 19]
"""

import argparse
import copy
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pykern

NUMBERS, LENGTH = 64, 12


def counting(rows: int, by: int) -> Tensor:
    """Rows of numbers, each number greater than the one before it by the same."""
    return (torch.randint(NUMBERS, (rows, 1)) + by * torch.arange(LENGTH)) % NUMBERS


def pipeline(model: torch.nn.Module, asked: argparse.Namespace) -> pykern.Pipeline:
    zeros = torch.zeros(asked.batch // asked.microbatches, LENGTH, dtype=torch.long)
    return pykern.Pipeline(
        model,
        devices=asked.devices,
        microbatches=asked.microbatches,
        loss_fn=lambda output: output.loss,
        sample={"input_ids": zeros, "labels": zeros},
    )


def train(model: torch.nn.Module, asked: argparse.Namespace, by: int) -> Tensor:
    """Trains what requires a gradient; returns the loss of the last step."""
    with pipeline(model, asked) as pipe:
        trained = [p for p in pipe.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=asked.rate)
        for _ in range(asked.steps):
            rows = counting(asked.batch, by)
            loss = pipe.step(input_ids=rows, labels=rows)
            pykern.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.cpu()
    return loss


def answer(model: LlamaForCausalLM) -> list[int]:
    prompt = torch.tensor([[5]])
    mask = torch.ones_like(prompt)
    found = model.eval().generate(
        input_ids=prompt, attention_mask=mask, max_new_tokens=7, do_sample=False, pad_token_id=0
    )
    return found[0].tolist()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    defaults = {"layers": 4, "width": 64, "heads": 4, "rank": 8, "batch": 16, "microbatches": 4}
    defaults |= {"steps": 60, "rate": 5e-3}
    for name, value in (defaults | {"devices": "cpu:2"}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, default=Path("lora-out"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    asked = parse(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the workers of the pipeline use the other cores
    config = LlamaConfig(
        vocab_size=NUMBERS,
        hidden_size=asked.width,
        intermediate_size=2 * asked.width,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.heads,
        use_cache=False,
    )
    base = LlamaForCausalLM(config).train()  # or from_pretrained, without the next line
    print(f"base: loss {train(base, asked, by=1):.3f}, counts {answer(base)}")
    untouched = copy.deepcopy(base)

    lora = LoraConfig(r=asked.rank, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(base, lora).train()
    numbers = [p.numel() for p in model.parameters() if p.requires_grad]
    print(f"{sum(numbers)} of {sum(p.numel() for p in model.parameters())} parameters train")
    print(f"adapters: loss {train(model, asked, by=2):.3f}, counts {answer(model)}")

    model.save_pretrained(asked.out)  # the adapters alone
    merged = PeftModel.from_pretrained(untouched, asked.out).merge_and_unload()
    print(f"without pykern: counts {answer(merged)}")


if __name__ == "__main__":
    main()
