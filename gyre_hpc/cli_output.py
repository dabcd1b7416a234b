"""Plain lines of a verb on the console: no markup, no wrapping, so that paths can be copied and scripts can read them."""

from __future__ import annotations

import msgspec
from rich.console import Console


def say(console: Console, *lines: str) -> None:
    """One line each."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def json_line(record: object) -> str:
    """A record on one line."""
    return msgspec.json.encode(record).decode()
