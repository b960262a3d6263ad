"""Errors for a word that is not one of those known, with the one that was meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})


def require_one_of(
    name: str, value: object, known: Iterable[object], meant: Mapping[str, str] = _NOTHING
) -> None:
    """Raises ValueError unless the value of an argument is one of those known.

    Args:
        name: of the argument.
        value: what it was given.
        known: all that it may be.
        meant: as of `nearest`.
    """
    known = list(known)
    if value in known:
        return
    *others, last = map(repr, known)
    among = f"one of {', '.join(others)} or {last}" if others else last
    near = nearest(str(value), [word for word in known if isinstance(word, str)], meant)
    instead = f"Did you mean {near!r}?" if near else "Use one of these"
    raise ValueError(f"{name} must be {among}, got {value!r}. {instead}")


def nearest(word: str, known: Iterable[str], meant: Mapping[str, str] = _NOTHING) -> str | None:
    """The known word that was most likely meant; None where no word is near.

    Args:
        word: that is not known.
        known: all words.
        meant: by other libraries' words, in small letters and digits, the known words for these.
    """
    plain = "".join(letter for letter in word.lower() if letter.isalnum())
    if plain in meant:
        return meant[plain]
    by_plain = {"".join(filter(str.isalnum, each.lower())): each for each in known}
    near = get_close_matches(plain, by_plain, n=1, cutoff=0.7)
    return by_plain[near[0]] if near else None
