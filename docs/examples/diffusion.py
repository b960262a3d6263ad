"""A diffusion model whose U-Net is a pipeline; its skip connections pass over stages.

    python docs/examples/diffusion.py

On GPUs, with a larger network:

    python docs/examples/diffusion.py --devices cuda --depth 4 --width 128 --size 64 --batch 256

Expected output (last digits differ between machines):

    step 50: loss 0.130
    step 100: loss 0.092
    step 150: loss 0.074
    step 200: loss 0.062
    ................
    .......##.......
    .....######.....
    ......####......
    .......#........
    ................
    ................
    ................
    without pykern: (2, 1, 16, 16)
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern


class Block(nn.Module):
    """Two convolutions, told the time between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm, self.time = nn.GroupNorm(4, after), nn.Linear(time, after)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = F.silu(self.conv1(x)) + self.time(time)[:, :, None, None]
        return F.silu(self.conv2(self.norm(x)))


class UNet(nn.Module):
    """Each level down halves the image; its output joins the level up of the same size."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        pairs = list(zip([1, *widths], widths, strict=False))
        self.down = nn.ModuleList(Block(i, o, width) for i, o in pairs)
        self.middle = Block(widths[-1], widths[-1], width)
        self.up = nn.ModuleList(Block(2 * o, max(i, width), width) for i, o in reversed(pairs))
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = self.time(time[:, None])
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return self.out(x)


def discs(count: int, size: int) -> Tensor:
    """Images of one bright disc each, between -1 and 1."""
    places = torch.arange(size)
    centres, radii = torch.rand(2, count, 1, 1) * size / 2 + size / 4, 2 + torch.rand(count, 1, 1)
    squares = (places[:, None] - centres[0]) ** 2 + (places - centres[1]) ** 2
    return (2.0 * (squares < radii**2) - 1).unsqueeze(1)


def shares(time: Tensor) -> tuple[Tensor, Tensor]:
    """How much of the image and how much of the noise there is at a time between 0 and 1."""
    angle = (time * torch.pi / 2).view(-1, 1, 1, 1)
    return angle.cos(), angle.sin()


@torch.no_grad()
def generated(model: nn.Module, count: int, size: int, steps: int) -> Tensor:
    """Images made of noise, step by step (DDIM)."""
    x = torch.randn(count, 1, size, size)
    times = torch.linspace(0.98, 0, steps + 1)
    for now, then in pairwise(times):
        noise = model(x, now.expand(count)).cpu()
        (image, noisy), (image_then, noisy_then) = shares(now), shares(then)
        x = image_then * ((x - noisy * noise) / image).clamp(-1, 1) + noisy_then * noise
    return x


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    defaults = {"depth": 2, "width": 16, "size": 16, "batch": 32, "microbatches": 4}
    defaults |= {"steps": 200, "images": 4, "sampling-steps": 20, "rate": 3e-3}
    for name, value in (defaults | {"devices": "cpu:2"}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, default=Path("diffusion.pt"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    asked = parse(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the workers of the pipeline use the other cores
    model = UNet(asked.depth, asked.width)
    rows = asked.batch // asked.microbatches
    pipe = pykern.Pipeline(
        model,
        devices=asked.devices,
        microbatches=asked.microbatches,
        loss_fn=F.mse_loss,
        sample=(torch.zeros(rows, 1, asked.size, asked.size), torch.zeros(rows)),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=asked.rate)
    for step in range(1, asked.steps + 1):
        images, time = discs(asked.batch, asked.size), torch.rand(asked.batch)
        noise = torch.randn_like(images)
        image, noisy = shares(time)
        loss = pipe.step(image * images + noisy * noise, time, target=noise)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, asked.steps // 4) == 0:
            print(f"step {step}: loss {loss:.3f}")
    images = generated(pipe, asked.images, asked.size, asked.sampling_steps)
    pipe.close()
    for row in images[0, 0, ::2]:  # characters are twice as high as wide
        print("".join("#" if value > 0 else "." for value in row.tolist()))

    torch.save(model.cpu().state_dict(), asked.out)
    alone = UNet(asked.depth, asked.width)
    alone.load_state_dict(torch.load(asked.out))
    print(f"without pykern: {tuple(generated(alone, 2, asked.size, 4).shape)}")


if __name__ == "__main__":
    main()
