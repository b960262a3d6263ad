"""The cut of a chain of layers: exact, deterministic, and refused where it is impossible."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from math import inf

import pytest
from torch import nn

from pykern.models import gpt
from pykern.partition.balance import partition
from pykern.partition.bottleneck import balanced_ends


class Sized(nn.Module):
    """A layer of a given number of parameters."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        if num_parameters:
            self.linear = nn.Linear(num_parameters, 1, bias=False)


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [
        (0, *middle, num_layers) for middle in combinations(range(1, num_layers), num_stages - 1)
    ]


def badness(costs: Sequence[int], cut: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
    """The quantities that `partition` promises to make least, in this order."""
    stages = [costs[start:end] for start, end in pairwise(cut)]
    stage_costs = [sum(stage) for stage in stages]
    squares = sum(cost**2 for cost in stage_costs)
    return max(stage_costs), squares, sum(len(stage) ** 2 for stage in stages), cut


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.choice([0, 1, 2, 3, 7, draw.randrange(100)]) for _ in range(draw.randint(1, 9))]
    for num_stages in range(1, len(costs) + 1):
        best = min(every_cut(len(costs), num_stages), key=lambda cut: badness(costs, cut))
        cut = partition([Sized(cost) for cost in costs], num_stages)
        assert [(stage.start, stage.stop) for stage in cut.stages] == list(pairwise(best))
        assert cut.costs == cut.parameters == tuple(sum(costs[a:b]) for a, b in pairwise(best))


def test_layers_that_all_cost_nothing_are_shared_out_evenly() -> None:
    cut = partition([nn.ReLU() for _ in range(7)], 3)
    assert [len(stage) for stage in cut.stages] == [2, 2, 3]


def test_layer_count_ignores_parameters() -> None:
    cut = partition([Sized(1000), Sized(1), Sized(1), Sized(1)], 2, balance="layers")
    assert (cut.stages, cut.costs, cut.parameters) == (
        (range(2), range(2, 4)),
        (2, 2),
        (1001, 2),
    )


def test_a_list_says_how_many_layers_each_stage_has() -> None:
    cut = partition([Sized(n) for n in (5, 1, 1, 1)], 2, balance=[3, 1])
    assert (cut.stages, cut.costs) == ((range(3), range(3, 4)), (7, 1))


def test_hundreds_of_layers_are_cut_quickly() -> None:
    draw = random.Random(0)
    costs = [draw.randrange(50) for _ in range(400)]
    cut = partition([Sized(cost) for cost in costs], 64)
    assert sum(cut.costs) == sum(costs)
    assert max(cut.costs) < 2 * sum(costs) / 64


def test_the_table_shows_stages_layers_parameters_and_shares() -> None:
    model = nn.Sequential(
        OrderedDict(embed=nn.Embedding(10, 2), a=nn.ReLU(), b=nn.ReLU(), head=nn.Linear(2, 10))
    )
    assert str(partition(model, 2, balance=[2, 2])).splitlines() == [
        "stage  layers        parameters  share of parameters",
        "    0  0-1 embed, a          20                40.0%",
        "    1  2-3 b, head           30                60.0%",
    ]


def test_the_table_leaves_out_the_middle_of_a_long_stage() -> None:
    table = str(partition(gpt(layers=2, width=8, heads=1), 1))
    assert "  0-5 Embedding, ..., Head  " in table


def test_the_table_of_a_model_without_parameters_has_no_shares() -> None:
    assert str(partition([nn.ReLU()], 1)).split()[-1] == "-"


@pytest.mark.parametrize(
    ("num_stages", "balance", "message"),
    [
        (3, "parameters", "the model must have at least 3 layers, one for each stage, got 2"),
        (0, "parameters", "num_stages must be 1 to 16777216, got 0"),
        (2, "weight", "balance must be 'parameters', .*, got 'weight'"),
        (2, 2, "balance must be 'parameters', .* a list of layer counts, .*, got 2"),
        (2, {1, 2}, "balance must be 'parameters', .* a list of layer counts, .*, got {1, 2}"),
        (2, {1: 2}, "balance must have a price for each layer, got none for '0'"),
        (
            2,
            "time",
            "sample must be given for, and only for, balance 'time' and 'memory', got "
            "balance=.* .* sample",
        ),
        (
            2,
            [1, 2],
            r"balance must hold 2 counts of at least 1, one per stage, that sum to .*, the "
            r"number of layers, got \[1, 2\]",
        ),
        (
            2,
            [2, 0],
            r"balance must hold 2 counts of at least 1, one per stage, that sum to .*, the "
            r"number of layers, got \[2, 0\]",
        ),
        (
            2,
            [2],
            r"balance must hold 2 counts of at least 1, one per stage, that sum to .*, the "
            r"number of layers, got \[2\]",
        ),
    ],
)
def test_an_impossible_cut_is_refused(num_stages: int, balance: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition([nn.ReLU(), nn.ReLU()], num_stages, balance=balance)  # type: ignore[arg-type]


def test_a_sample_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"sample must be given for, and only for, balance 'time' and 'memory', got "
        r"balance=.* .* sample",
    ):
        partition([nn.ReLU()], 1, sample=1)


@pytest.mark.parametrize(
    ("layers", "num_stages", "balance", "message"),
    [
        (
            nn.Linear(2, 2),
            1,
            "layers",
            "layers must be an nn.Sequential or a list of modules, one per layer, got Linear",
        ),
        ([nn.ReLU(), "ReLU"], 1, "layers", "layer 1 must be an nn.Module, got str"),
        ([nn.ReLU()], 1.0, "layers", "num_stages must be an int, got 1.0"),
        ([nn.ReLU()], True, "layers", "num_stages must be an int, got True"),
        ([nn.ReLU()], 1, [1.0], "each count of balance must be an int, got 1.0"),
    ],
)
def test_wrong_types_are_refused(
    layers: object, num_stages: object, balance: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        partition(layers, num_stages, balance=balance)  # type: ignore[arg-type]


def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="layer LazyLinear must have no lazy parameters, got some"):
        partition([nn.LazyLinear(3)], 1)


def test_prices_fit_numbers_and_types_of_layers_without_names() -> None:
    """Only types fitted, although errors and `split_at` go by number."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    by_number = partition(layers, 2, balance={"0": 3, "*": 1})
    assert by_number.stages == (range(1), range(1, 4))
    by_type = partition(layers, 2, balance={"1": 3, "Linear": 1, "*": 0})
    assert by_type.costs == (4_000_000, 1_000_000)
    named = dict(layers.named_children())
    assert partition(named, 2, balance={"0": 3, "*": 1}) == by_number
    with pytest.raises(
        ValueError,
        match=r"balance must have a price for each layer, got none for '1' \(ReLU\): patterns "
        r"'Linear' do not match",
    ):
        partition(layers, 2, balance={"Linear": 1})


def test_a_layer_that_occurs_twice_counts_twice() -> None:
    layer = nn.ReLU()
    assert partition(nn.Sequential(layer, layer), 2).stages == (range(1), range(1, 2))


def ends_one_by_one(costs: Sequence[int], num_stages: int) -> list[int]:
    """The rule of `partition` as it reads: every end of every stage is tried, without an idea."""
    total = [0, *accumulate(costs)]
    limit = least_bottleneck(costs, num_stages)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(num_stages):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (cost_squares, count_squares, ends) in best.items():
            for end in range(start + 1, len(costs) + 1):
                cost = total[end] - total[start]
                squares = cost_squares + cost**2, count_squares + (end - start) ** 2
                if cost <= limit:
                    longer[end] = min(
                        longer.get(end, (*squares, (*ends, end))), (*squares, (*ends, end))
                    )
        best = longer
    return list(best[len(costs)][2])


def least_bottleneck(costs: Sequence[int], num_stages: int) -> int:
    """The cost of the costliest stage of the best cut."""
    cheapest: list[float] = [0, *[inf] * len(costs)]
    for _ in range(num_stages):
        cheapest = [
            min(
                (max(cheapest[start], sum(costs[start:end])) for start in range(end)),
                default=inf,
            )
            for end in range(len(costs) + 1)
        ]
    return int(cheapest[-1])


def test_the_cut_is_that_of_trying_every_end() -> None:
    rng = random.Random(4)
    for _ in range(400):
        num_layers = rng.randint(1, rng.choice([6, 12]))
        costs = rng.choices(range(rng.choice([1, 2, 3, 11, 10**6])), k=num_layers)
        if rng.random() < 0.4:
            costs[rng.randrange(num_layers)] = rng.choice([0, 5, 50, 10**9])
        num_stages = rng.randint(1, num_layers)
        assert balanced_ends(costs, num_stages) == ends_one_by_one(costs, num_stages)


@pytest.mark.parametrize("largest", [1, 10**7])
def test_thousands_of_layers_are_cut(largest: int) -> None:
    """Each end of which used to be tried with each other: a hundred million pairs."""
    costs = [1 + layer % 7 for layer in range(8000)]
    costs[3000] = largest
    ends = balanced_ends(costs, 4)
    assert len(ends) == 4
    stages = [sum(costs[start:end]) for start, end in pairwise([0, *ends])]
    rest = sum(costs) - largest
    if largest > rest:
        assert max(stages) == largest
    else:
        assert max(stages) - min(stages) <= 2 * 7


def test_prices_that_are_all_zero_are_refused() -> None:
    """A pattern in small letters left all types out, and layers were shared out by their number."""
    with pytest.raises(
        ValueError,
        match=r"balance must give a layer a price above 0, got {'\*linear\*': 1, '\*': 0}. "
        r"Capitals count in patterns: the layers are Linear, ReLU$",
    ):
        partition([nn.Linear(2, 2), nn.ReLU()], 2, balance={"*linear*": 1, "*": 0})
