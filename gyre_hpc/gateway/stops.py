"""Stop strings in a growing answer, at a cost that does not grow with it. Pure.

A decoder may spell the first characters of a window of ids differently from their place in the whole text (half a
character, a lost space), and the last ones may change when more ids complete them: a search keeps clear of the former
and takes the latter again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

EDGE_CHARS = 4
"""Most characters that depend on where a decoded window begins or ends: the bytes of one UTF-8 character."""


def find_stop(
    text_of: Callable[[Sequence[int]], str], ids: Sequence[int], known: int, stops: Sequence[str]
) -> tuple[str, int] | None:
    """The stop string that comes first in the text of `ids`, and how many ids it takes to complete it.

    The text of the first `known` ids has been searched before and holds none.
    """
    longest = max(map(len, stops))
    start, seen = _window(text_of, ids, known, longest)
    begin = max(0, seen - longest - EDGE_CHARS)
    text = text_of(ids[start:])
    found = [stop for stop in stops if stop and text.find(stop, begin) >= 0]
    if not found:
        return None
    first = min(found, key=lambda stop: text.find(stop, begin))
    ends = range(known + 1, len(ids) + 1)
    place = bisect_left(ends, True, key=lambda end: text_of(ids[start:end]).find(first, begin) >= 0)
    return first, ends[min(place, len(ends) - 1)]


def _window(
    text_of: Callable[[Sequence[int]], str], ids: Sequence[int], known: int, longest: int
) -> tuple[int, int]:
    """(first id of a window whose known part has room for a stop string and both edges, characters of that part)."""
    need = longest + 2 * EDGE_CHARS
    count = need
    while count < known:
        seen = len(text_of(ids[known - count : known]))
        if seen >= need:
            return known - count, seen
        count *= 2
    return 0, len(text_of(ids[:known]))
