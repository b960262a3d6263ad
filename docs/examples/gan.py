"""A GAN of two pipelines: the generator's loss is outside of both and goes back through both.

    python docs/examples/gan.py

On GPUs, with larger networks:

    python docs/examples/gan.py --devices cuda --layers 32 --width 4096 --batch 4096

In grad mode `pipe(x)` is one operation of autograd, so any loss may follow.

Expected output (last digits differ between machines):

    step 75: critic 1.385, generator 0.726
    step 150: critic 1.388, generator 0.729
    step 225: critic 1.384, generator 0.693
    step 300: critic 1.385, generator 0.717
    wanted: mean (1.01, -1.00), spread (0.71, 0.35)
    without pykern: mean (0.95, -1.03), spread (0.65, 0.33)
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

NOISE = 4


def network(inputs: int, outputs: int, layers: int, width: int) -> nn.Sequential:
    widths = [inputs, *[width] * (layers - 1)]
    pairs = pairwise(widths)
    hidden = [nn.Sequential(nn.Linear(i, o), nn.LeakyReLU(0.2)) for i, o in pairs]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def real(count: int) -> Tensor:
    """Points on an ellipse around (1, -1)."""
    angle = torch.rand(count, 1) * 2 * torch.pi
    return torch.cat([1 + angle.cos(), 0.5 * angle.sin() - 1], dim=1)


def told(points: Tensor) -> str:
    mean, spread = points.mean(0).tolist(), points.std(0).tolist()
    return f"mean ({mean[0]:.2f}, {mean[1]:.2f}), spread ({spread[0]:.2f}, {spread[1]:.2f})"


def loss_of(logits: Tensor, is_real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    defaults = {"layers": 4, "width": 32, "batch": 128, "microbatches": 2}
    defaults |= {"steps": 300, "rate": 2e-3}
    for name, value in (defaults | {"devices": "cpu:2"}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, default=Path("generator.pt"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    asked = parse(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the workers of the pipeline use the other cores
    model = network(NOISE, 2, asked.layers, asked.width)
    generator, critic = (
        pykern.Pipeline(each, devices=asked.devices, microbatches=asked.microbatches)
        for each in (model, network(2, 1, asked.layers, asked.width))
    )
    optimizers = [
        torch.optim.Adam(each.parameters(), lr=asked.rate, betas=(0.0, 0.9))
        for each in (generator, critic)
    ]
    for step in range(1, asked.steps + 1):
        fake = generator(torch.randn(asked.batch, NOISE))
        critic_loss = loss_of(critic(real(asked.batch)), is_real=True)
        critic_loss = critic_loss + loss_of(critic(fake.detach()), is_real=False)
        critic_loss.backward()
        optimizers[1].step()
        generator_loss = loss_of(critic(fake), is_real=True)
        generator_loss.backward()  # through the critic into the generator
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step % max(1, asked.steps // 4) == 0:
            print(f"step {step}: critic {critic_loss:.3f}, generator {generator_loss:.3f}")
    generator.close()
    critic.close()

    torch.save(model.cpu().state_dict(), asked.out)
    alone = network(NOISE, 2, asked.layers, asked.width)
    alone.load_state_dict(torch.load(asked.out))
    print(f"wanted: {told(real(1000))}")
    with torch.no_grad():
        print(f"without pykern: {told(alone(torch.randn(1000, NOISE)))}")


if __name__ == "__main__":
    main()
