"""A process of a step that writes down the name of every signal it gets: python signal_recorder.py FOLDER."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

FILE = Path(sys.argv[1]) / "signals"


def note(number: int, frame: object) -> None:
    with FILE.open("a") as file:
        file.write(signal.Signals(number).name + "\n")


for each in signal.Signals:
    if each not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(each, note)
FILE.touch()
while True:
    signal.pause()
