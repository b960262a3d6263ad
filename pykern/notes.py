"""Notes on exceptions of the user's, which may be of any kind."""

from __future__ import annotations


class _Note(str):
    """A note, which can be told from notes of others.

    Attributes:
        of: who has added it.
    """

    __slots__ = ("of",)
    of: object


def add_note(error: BaseException, text: str, of: object = None) -> None:
    """Has the exception say what happened, if it takes notes.

    Args:
        error: any: it may have an `add_note` of its own, or refuse to be changed.
        text: what happened; nothing is added that it says already.
        of: by whom the note can be forgotten.
    """
    note = _Note(f"pykern: {text}")
    note.of = of
    # Whatever goes wrong here, that exception is the one to be raised.
    try:
        if note not in getattr(error, "__notes__", ()):
            # Not the class's own, which may do anything.
            BaseException.add_note(error, note)
    except BaseException:
        return


def forget_notes(error: BaseException, of: object) -> None:
    """Removes the notes of `of` from an exception that is raised again."""
    try:
        notes = error.__notes__
        notes[:] = [note for note in notes if not (isinstance(note, _Note) and note.of is of)]
    except BaseException:
        return


def shown(error: BaseException) -> str:
    """The repr of an exception, or a substitute if the repr fails."""
    try:
        return repr(error)
    except BaseException:
        return f"a {type(error).__name__} whose repr fails"
