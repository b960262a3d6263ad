"""The text form of actions, and what an action refuses to be."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.plan import Action, Kind

actions = st.builds(
    Action,
    st.sampled_from(Kind),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 255),
)


@given(actions)
def test_text_and_pickle_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert pickle.loads(pickle.dumps(action)) == action


def test_text_is_stage_kind_microbatch() -> None:
    assert str(Action(Kind.F, 2, 0)) == "2F0"
    assert str(Action(Kind.COPY_B, 12, 34)) == "12COPY_B34"
    assert str(Action(Kind.F, 2, 0, slice=3)) == "2F0.3"
    assert Action.parse("7REDUCE1") == Action(Kind.REDUCE, stage=7, microbatch=1)


@pytest.mark.parametrize(
    "text",
    [
        *["", "F", "2F", "F0", "2 F0", " 2F0", "2F0\n", "02F0", "2F00", "2f0", "2X0", "2F-1", "2"],
        *[
            "2F0F1",
            "2FB0",
            "+2F0",
            "2F0x",
            "٢F0",
            "2F1.0",
            "2F1.0",
            "2F1.01",
            "2F1.1.1",
            "2F1.",
            ".1",
            "2F0\x00",
            "9" * 40 + "F0",
            "-2F0",
        ],
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an action must be stage, kind, microbatch"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("stage", "microbatch", "message"),
    [
        (-1, 0, "stage must be 0 to 65535, got -1"),
        (65536, 0, "stage must be 0 to 65535, got 65536"),
        (0, -1, "microbatch must be 0 to 4294967295, got -1"),
        (0, 2**32, "microbatch must be 0 to 4294967295, got 4294967296"),
    ],
)
def test_numbers_out_of_range_are_refused(stage: int, microbatch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Action(Kind.F, stage, microbatch)
    if stage >= 0 and microbatch >= 0:
        with pytest.raises(ValueError, match=message):
            Action.parse(f"{stage}F{microbatch}")


@given(actions, actions)
def test_equality_and_hash_follow_the_text(left: Action, right: Action) -> None:
    assert (left == right) == (str(left) == str(right))
    assert hash(left) == hash(Action.parse(str(left)))
    assert left != str(left)


def test_an_action_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Action(Kind.F, 0, 0).stage = 1  # type: ignore[misc]
