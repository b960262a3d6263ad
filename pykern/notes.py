"""Notes on the user's exceptions, which may be of any kind."""

from __future__ import annotations


class _Note(str):
    """A note of pykern's, which can be told from other notes.

    Attributes:
        of: the object that has added the note.
    """

    __slots__ = ("of",)
    of: object


def add_note(error: BaseException, text: str, of: object = None) -> None:
    """Adds a note to an exception, if the exception takes notes.

    Args:
        error: any exception, which may have an `add_note` of its own, or refuse to be changed.
        text: the text of the note; it is not added twice.
        of: the object for which `forget_notes` removes the note.
    """
    note = _Note(f"pykern: {text}")
    note.of = of
    # The caller raises `error`, so no failure here may take its place.
    try:
        if note not in getattr(error, "__notes__", ()):
            # An `add_note` of the exception's own class may do anything.
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
