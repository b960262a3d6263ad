"""The part of copies that is hidden, since some device works meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..plan import Span


def hidden_share(copies: Sequence[Span], work: Iterable[Span]) -> float | None:
    """The part of the copies' time in which some device works, 0 to 1; None without such time."""
    total = sum(span.end_ns - span.start_ns for span in copies)
    if not total:
        return None
    busy = list(_joined(sorted(work, key=lambda span: span.start_ns)))
    return sum(_beside(span, busy) for span in copies) / total


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans by their starts, joined where they overlap."""
    held: Span | None = None
    for span in spans:
        if held is None or span.start_ns > held.end_ns:
            if held is not None:
                yield held
            held = span
        else:
            held = Span(held.action, held.start_ns, max(held.end_ns, span.end_ns))
    if held is not None:
        yield held


def _beside(copy: Span, work: Sequence[Span]) -> float:
    """The part of a copy's time in which some device works."""
    return sum(
        max(0.0, min(copy.end_ns, span.end_ns) - max(copy.start_ns, span.start_ns)) for span in work
    )
