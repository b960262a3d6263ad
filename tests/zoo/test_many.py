"""Models of other projects on two stages and on three: all at night, a few in every run."""

import pytest

from tests.diagonal import nightly
from tests.torture.models import STAGES, all_models, cases

pytestmark = pytest.mark.filterwarnings("ignore")

# Small and quick to import, of kinds that the rest of the zoo has not.
FEW = {"transformers mamba", "transformers t5", "transformers vit", "transformers gpt_oss"}


def numbers() -> list[object]:
    """The numbers of the few as they are, the others marked."""
    found: list[object] = []
    for place, name in enumerate(all_models()):
        for turn in range(len(STAGES)):
            number = len(STAGES) * place + turn
            found.append(
                pytest.param(number, id=f"{name} {STAGES[turn]}")
                if name in FEW
                else nightly(number)
            )
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", numbers())
def test_a_model_of_another_project_has_every_bit(number: int) -> None:
    assert list(cases(0, number))


def test_there_are_more_than_one_hundred_and_fifty() -> None:
    assert len(all_models()) >= 150
