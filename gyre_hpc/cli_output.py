"""What verbs write: plain lines, without markup and wrapping, so that paths can be copied and scripts can read them."""

from __future__ import annotations

import msgspec
from rich.console import Console


def say(console: Console, *lines: str) -> None:
    """One line each."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def json_line(record: object) -> str:
    """A record on one line."""
    return msgspec.json.encode(record).decode()
