"""Models of transformers, timm, torchvision and torch_geometric on two stages and on three."""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from tests.zoo.many.check import outcome
from tests.zoo.many.pictures import Make, define_operators

from .campaign import Campaign

# The package, and the module of tests/zoo/many with its models.
SOURCES = {
    "transformers": "hugging_face",
    "torchvision": "torchvision_models",
    "timm": "timm_models",
    "torch_geometric": "graph_models",
}
STAGES = (2, 3)


@cache
def all_models() -> dict[str, Make]:
    """The models of the packages that are installed."""
    define_operators()
    return {
        name: make
        for package, module in SOURCES.items()
        if find_spec(package)
        for name, make in import_module(f"tests.zoo.many.{module}").CASES.items()
    }


def cases(seed: int, number: int) -> Iterator[str]:
    """One model on so many stages."""
    models = list(all_models().items())
    name, make = models[(number // len(STAGES) + seed) % len(models)]
    num_stages = STAGES[number % len(STAGES)]
    if number % len(STAGES) == 0:
        yield "models"
        yield f"models of {name.partition(' ')[0]}"
    found = outcome(make, num_stages)
    said = f"{name} on {num_stages} stages: {found.kind}: {found.detail}"
    assert found.kind not in ("refused", "wrong"), said
    yield f"{found.kind} on {num_stages} stages"


CAMPAIGN = Campaign(
    promise=(
        "A model of another project runs unchanged. A "
        "step is bitwise equal to the plain model run microbatch by microbatch. Models whose "
        "stages share parameters are compared with untied copies."
    ),
    case=cases,
    total=len(STAGES) * len(all_models()),
    seconds=1200.0,
)
