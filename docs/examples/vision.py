"""A residual network with batch norm in a pipeline: trained, evaluated, exported.

    python docs/examples/vision.py

On GPUs, with a larger network:

    python docs/examples/vision.py --devices cuda --blocks 16 --width 128 --size 64 --batch 256

Running statistics move once in a step, by those of the whole batch (deferred_batch_norm), so
momentum does not depend on the number of microbatches.

Expected output (last digits differ between machines):

    epoch 1: loss 0.165, accuracy 21%
    epoch 2: loss 0.024, accuracy 81%
    epoch 3: loss 0.004, accuracy 100%
    batches counted by a batch norm: 24
    without pykern: accuracy 100%
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pykern

SHAPES = ("bar", "column", "square", "cross")


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(hidden)))


class Network(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, len(SHAPES))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.amax((2, 3)))


def images(count: int, size: int) -> TensorDataset:
    """Noisy images of a shape in a random colour and place, and which shape it is."""
    labels = torch.randint(len(SHAPES), (count,))
    centres = torch.randint(3, size - 3, (2, count, 1, 1))
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    down, right = (rows - centres[0]).abs(), (columns - centres[1]).abs()
    bar, column = (down < 1) & (right < 3), (down < 3) & (right < 1)
    forms = torch.stack([bar, column, (down < 2) & (right < 2), bar | column])
    shown = forms[labels, torch.arange(count)].unsqueeze(1)
    colours = 1 + torch.rand(count, 3, 1, 1)
    return TensorDataset(shown * colours + 0.3 * torch.randn(count, 3, size, size), labels)


@torch.no_grad()
def accuracy(model: nn.Module, data: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    right = [model(x).cpu().argmax(1) == labels for x, labels in data]
    model.train()
    return torch.cat(right).float().mean().item()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    defaults = {"blocks": 4, "width": 16, "size": 12, "batch": 64, "microbatches": 4}
    defaults |= {"images": 512, "epochs": 3, "rate": 3e-3}
    for name, value in (defaults | {"devices": "cpu:2"}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, default=Path("vision-out"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    asked = parse(arguments)
    asked.out.mkdir(exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the workers of the pipeline use the other cores
    train, held_out = (images(count, asked.size) for count in (asked.images, 256))
    held_out_loader = DataLoader(held_out, asked.batch)
    model = Network(asked.blocks, asked.width)
    pipe = pykern.Pipeline(
        model,
        devices=asked.devices,
        microbatches=asked.microbatches,
        loss_fn=F.cross_entropy,
        sample=torch.zeros(asked.batch // asked.microbatches, 3, asked.size, asked.size),
        deferred_batch_norm=True,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=asked.rate)
    for epoch in range(1, asked.epochs + 1):
        for x, labels in DataLoader(train, asked.batch, shuffle=True, drop_last=True):
            loss = pipe.step(x, target=labels)
            optimizer.step()
            optimizer.zero_grad()
        found = accuracy(pipe, held_out_loader)
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {found:.0%}")
    print(f"batches counted by a batch norm: {model.stem[1].num_batches_tracked.item()}")
    pipe.close()

    some = held_out.tensors[0][:8]
    exported = torch.export.export(
        model.cpu().eval(), (some,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    torch.export.save(exported, asked.out / "model.pt2")
    alone = torch.export.load(asked.out / "model.pt2").module()
    right = alone(held_out.tensors[0]).argmax(1) == held_out.tensors[1]
    print(f"without pykern: accuracy {right.float().mean():.0%}")


if __name__ == "__main__":
    main()
