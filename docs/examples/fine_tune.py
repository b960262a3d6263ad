"""A transformers model fine-tuned by Trainer, whose steps are a pipeline's.

    python docs/examples/fine_tune.py

On GPUs, with a larger model:

    python docs/examples/fine_tune.py --devices cuda --layers 32 --width 2048 --microbatches 16

Rows have labels of different numbers (-100 elsewhere), some none at all. Trainer counts the labels
of a batch (num_items_in_batch), so every label weighs the same, whichever microbatch has it.

Expected output (last digits differ between machines):

    step 20: loss 2.766
    step 40: loss 0.955
    step 60: loss 0.404
    held-out loss 0.366
    without pykern: [5, 6, 7, 8, 9, 10, 11, 12]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import pykern

NUMBERS, LENGTH, IGNORED = 64, 12, -100


def counting(rows: int) -> list[dict[str, Tensor]]:
    """Rows that count upwards, after a prompt of random length, which has no labels."""
    data = []
    for start, prompt in zip(
        torch.randint(NUMBERS, (rows,)), torch.randint(2, LENGTH + 1, (rows,)), strict=True
    ):
        ids = (start + torch.arange(LENGTH)) % NUMBERS
        labels = ids.clone()
        labels[:prompt] = IGNORED
        data.append({"input_ids": ids, "labels": labels})
    return data


class PipelineTrainer(Trainer):
    """Trainer, with the forward and backward of `pipeline`, which has the model's parameters."""

    def __init__(self, *args: Any, pipeline: pykern.Pipeline, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline = pipeline

    def training_step(self, _: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.pipeline.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.pipeline.step(**inputs, num_items_in_batch=num_items_in_batch)
        return loss.to(self.args.device)

    def compute_loss(
        self, _: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = self.pipeline(**inputs, num_items_in_batch=num_items_in_batch)
        return (output.loss, output) if return_outputs else output.loss


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    defaults = {"layers": 4, "width": 64, "heads": 4, "rows": 512, "batch": 16, "microbatches": 4}
    defaults |= {"steps": 60, "accumulate": 2, "rate": 3e-3}
    for name, value in (defaults | {"devices": "cpu:2"}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, default=Path("fine-tune-out"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    asked = parse(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the workers of the pipeline use the other cores
    model = LlamaForCausalLM(  # or from_pretrained
        LlamaConfig(
            vocab_size=NUMBERS,
            hidden_size=asked.width,
            intermediate_size=2 * asked.width,
            num_hidden_layers=asked.layers,
            num_attention_heads=asked.heads,
            use_cache=False,
        )
    )
    zeros = torch.zeros(asked.batch // asked.microbatches, LENGTH, dtype=torch.long)
    pipe = pykern.Pipeline(
        model,
        devices=asked.devices,
        microbatches=asked.microbatches,
        loss_fn=lambda output: output.loss,
        reduction="sum",  # of losses that are divided by the labels of the batch
        sample={"input_ids": zeros, "labels": zeros, "num_items_in_batch": 1},
    )
    model.hf_device_map = pipe.hf_device_map  # the Trainer leaves the layers where they are
    options = TrainingArguments(
        output_dir=asked.out,
        max_steps=asked.steps,
        learning_rate=asked.rate,
        per_device_train_batch_size=asked.batch,
        gradient_accumulation_steps=asked.accumulate,
        max_grad_norm=1.0,
        logging_steps=max(1, asked.steps // 3),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=asked.devices.startswith("cpu"),
        dataloader_pin_memory=False,
        seed=0,
    )
    options._n_gpu = 1  # no DataParallel where there are several GPUs
    trainer = PipelineTrainer(
        model, options, train_dataset=counting(asked.rows), pipeline=pipe, eval_dataset=counting(32)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        print(f"step {entry['step']}: loss {entry['loss']:.3f}")
    print(f"held-out loss {trainer.evaluate()['eval_loss']:.3f}")
    pipe.close()

    model.cpu().save_pretrained(asked.out)
    alone = LlamaForCausalLM.from_pretrained(asked.out)
    prompt = torch.tensor([[5, 6, 7]])
    answer = alone.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    print(f"without pykern: {answer[0].tolist()}")


if __name__ == "__main__":
    main()
