"""Notes on exceptions of the user's, which may be of any kind."""

from __future__ import annotations


def add_note(error: BaseException, text: str) -> None:
    """Has the exception say what happened, if it takes notes, and does not say so already."""
    note = f"pykern: {text}"
    # By the type's own: a class may have an `add_note` that does anything.
    try:
        if note not in getattr(error, "__notes__", ()):
            BaseException.add_note(error, note)
    except Exception:
        # A frozen dataclass takes none, nor one whose notes are not a list.
        return
