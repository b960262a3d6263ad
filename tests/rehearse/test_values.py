"""Layers, losses and optimizers that look at values leave the bytes of a rehearsal known."""

from pathlib import Path

import pytest

from tests.rehearse.scripts import line_with, rehearse, written

HEAD = """
import torch
from torch import nn
import pykern

def sgd(of):
    return torch.optim.SGD(of, momentum=0.9)

def rehearsed(looks, of_loss=lambda y: None, optimizer=sgd):
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(looks(x))

    def mse(y, target):
        of_loss(y)
        return nn.functional.mse_loss(y, target)

    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), Looks(64, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 64)]
    pipe = pykern.Pipeline(layers, devices="cuda", microbatches=4, loss_fn=mse)
    made = optimizer(pipe.parameters())
    batch = torch.randn(32, 64)
    pipe.step(batch.cuda(), target=batch.cuda())

rehearsed(lambda x: x)
"""
# Functions of a layer's input, which change no value, and whether their values are looked at.
LOOKS = {
    "item": ("x if x.sum().item() < 1e9 else -x", True),
    "mask": ("x if x.detach()[x.detach() > 1e9].numel() == 0 else -x", True),
    "numpy": ("x if x.detach().cpu().numpy().shape[1] == 64 else -x", True),
    "print": ("x if print(x.detach().mean(), x.detach().mean().cpu()) is None else -x", False),
    "moves": ('x.to("cpu").to("cuda") + torch.zeros(64, device="cuda")', False),
}
MORE = {
    "tolist": ("x if len(x[0].tolist()) == 64 else -x", True),
    "float": ("x if float(x.detach().abs().max()) < 1e9 else -x", True),
    "int": ("x if int(x.detach().abs().max()) < 9 else -x", True),
    "bool": ("x if x.isfinite().all() else -x", True),
    "nonzero": ("x if x.detach().abs().ge(1e9).nonzero().numel() == 0 else -x", True),
    "format": ("x if f'{x.detach().mean():.1f}' else -x", True),
    "equal": ("x if torch.equal(x, x.clone()) else -x", True),
    "where": ("x if torch.where(x.detach() > 1e9)[0].numel() == 0 else -x", True),
    "unique": ("x if torch.unique(x.detach()).numel() > 1 else -x", True),
    "device": ("x + torch.zeros(64, device=x.device)", False),
}
LOSS = "rehearsed(lambda x: x, of_loss=lambda y: y.sum().item())  # loss"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "names", [[*LOOKS], pytest.param([*MORE], marks=pytest.mark.nightly)], ids=["few", "more"]
)
def test_bytes_are_known_of_layers_that_look_at_values(tmp_path: Path, names: list[str]) -> None:
    """Each of these calls lost the bytes of all devices, and with them all times."""
    of = {**LOOKS, **MORE}
    lines = [f"rehearsed(lambda x: {of[name][0]})  # {name}" for name in names]
    script = written(tmp_path, "\n".join([HEAD, *lines, LOSS, ""]))
    seen = rehearse(script, tmp_path)
    assert seen.status == 0, seen.err
    plain, *others = seen.seen["pipelines"]
    assert plain["notes"] == []
    least = [sum(map(_number, one.values())) for one in plain["devices"]]
    for name, one in zip([*names, "loss"], others, strict=True):
        assert one["prediction"]["step_ns"] > 0, name
        # The trial has drawn no random number, and left buffers alone.
        assert one["losses"] == plain["losses"], name
        totals = [sum(map(_number, each.values())) for each in one["devices"]]
        for total, of_plain in zip(totals, least, strict=True):
            assert of_plain <= total < 1.2 * of_plain, name
        if name in of and not of[name][1]:
            assert one["notes"] == [], name
            continue
        (note,) = one["notes"]
        assert note.startswith("bytes are those of the first microbatch, which the CPU computed")
        assert note.endswith(f", at train.py:{line_with(script, f'  # {name}')}"), name
    # The waits of the trial are not those of a step, which has an F for each microbatch.
    at = line_with(script, "  # loss")
    (wait,) = [one for one in seen.seen["waits"] if one["line"] == at]
    assert (wait["call"], wait["action"], wait["times"]) == ("item", "F of stage 1", 4)


def _number(value: object) -> float:
    return value if isinstance(value, float | int) else 0.0


OPTIMIZERS = """
class Reads(torch.optim.SGD):
    def step(self):
        assert self.param_groups[0]["params"][0].grad.isfinite().all().item()
        super().step()

class Fails(torch.optim.SGD):
    def step(self):
        raise RuntimeError("before the first backward")

rehearsed(lambda x: x, optimizer=lambda of: Reads(of, momentum=0.9))
rehearsed(lambda x: x, optimizer=lambda of: Fails(of, momentum=0.9))
rehearsed(lambda x: x if x.sum().item() < 1e9 else -x, optimizer=lambda of: Fails(of, momentum=0.9))
"""


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_bytes_are_known_with_optimizers_that_look_at_values(tmp_path: Path) -> None:
    seen = rehearse(written(tmp_path, HEAD + OPTIMIZERS), tmp_path)
    assert seen.status == 0, seen.err
    plain, reads, fails, both = seen.seen["pipelines"]
    state = [[one["optimizer"] for one in of["devices"]] for of in (plain, reads)]
    assert state[0] == state[1]
    assert all(one["optimizer"] > 0 for one in plain["devices"])
    assert all(one["optimizer"] == 0 for one in fails["devices"] + both["devices"])
    assert [len(one["notes"]) for one in (plain, reads, fails, both)] == [0, 1, 1, 2]
    assert "without the state of the optimizer" in fails["notes"][0]
    for one in (fails, both):
        assert one["prediction"]["step_ns"] > 0


SPARSE = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 8, sparse=True)

    def forward(self, ids):
        return self.table(ids).mean(1)

layers = [Words(), nn.Linear(8, 8)]
pipe = pykern.Pipeline(layers, devices="cuda", microbatches=2, loss_fn=nn.functional.mse_loss)
rest = torch.optim.SGD(layers[1].parameters(), lr=0.1)
table = torch.optim.SparseAdam(layers[0].parameters())
ids = torch.randint(1000, (4, 5), device="cuda")
for _ in range(3):
    pipe.step(ids, target=torch.zeros(4, 8, device="cuda"))
    rest.step(), table.step()
"""


@pytest.mark.timeout(120)
def test_sparse_gradients_and_two_optimizers(tmp_path: Path) -> None:
    """A sparse gradient has no bytes by torch's name for them, which ended the rehearsal."""
    seen = rehearse(written(tmp_path, HEAD + SPARSE), tmp_path)
    assert seen.status == 0, seen.err
    _, pipeline = seen.seen["pipelines"]
    assert pipeline["prediction"]["step_ns"] > 0
    (note,) = [each for each in pipeline["notes"] if "the state of SparseAdam is counted" in each]
    assert note.endswith("for all parameters that train, which it lacks in part")
