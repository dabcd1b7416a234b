"""Makes the cells of a run stop at named points until a test has dealt with them; on PYTHONPATH in such tests alone.

Python imports this at its start. In a cell leader it wraps what the cell does at each point; where STOPS/<cell>.<point> is
there, the process renames it to <cell>.<point>.reached, with its pid in it, and stands still until a file
<cell>.<point>.go appears, or it is killed. Heartbeats go on, as they come from a thread of their own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("GYRE_TEST_STOPS", "")
LOOK_S = 0.02


def cell() -> str:
    """Index of the cell that this process leads; "" in all other processes."""
    words = sys.orig_argv
    return words[words.index("--cell") + 1] if FOLDER and "gyre_hpc.cells.leader" in words else ""


def at(point: str) -> None:
    """Stand still here if a test wants it."""
    stop = Path(FOLDER) / f"{cell()}.{point}"
    if not stop.exists():
        return
    stop.write_text(str(os.getpid()))
    stop.rename(stop.with_name(stop.name + ".reached"))
    while not stop.with_name(stop.name + ".go").exists():
        time.sleep(LOOK_S)


def wrap(owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Points before and after a function."""
    real: Callable[..., Any] = getattr(owner, name)

    def stopping(*given: Any, **named: Any) -> Any:
        if before:
            at(before)
        result = real(*given, **named)
        if after:
            at(after)
        return result

    setattr(owner, name, stopping)


def wrap_commit(host: Any) -> None:
    """Within the optimizer step: parameters are changed, and nobody has been told."""
    real = host._commit

    def stopping(self: Any, *given: Any) -> Any:
        at("optimizer step begins")
        optimizer = self._ready()._optimizer
        if "step" not in vars(optimizer):
            wrap(optimizer, "step", after="within the optimizer step")
        return real(self, *given)

    host._commit = stopping


def wrap_messages(kind: Any) -> None:
    """What the cell says, by the name of the message."""
    real = kind.__init__

    def init(self: Any, config: Any, layout: Any, send: Callable[[Any], None], *given: Any) -> None:
        def say(message: Any) -> None:
            name = type(message).__name__
            at(f"say {name}")
            send(message)
            at(f"said {name}")

        real(self, config, layout, say, *given)

    kind.__init__ = init


def install() -> None:
    from gyre_hpc.cells.cell import Cell
    from gyre_hpc.cells.trainer_host import TrainerHost
    from gyre_hpc.training import checkpoints
    from gyre_hpc.transport import regions

    wrap_messages(Cell)
    wrap_commit(TrainerHost)
    wrap(TrainerHost, "_enter", after="trainer restored")
    wrap(TrainerHost, "_leave", after="trainer off-loaded")
    wrap(TrainerHost, "_load_weights", before="snapshot loads")
    wrap(TrainerHost, "_restore", before="checkpoint loads", after="checkpoint loaded")
    wrap(TrainerHost, "_micro_step", before="micro-step begins", after="micro-step is done")
    wrap(TrainerHost, "_take_gradient", before="write gradient", after="wrote gradient")
    wrap(checkpoints, "_put_in_place", before="checkpoint is half written", after="checkpoint is on disk")
    mapped = regions._mapped

    def half_pulled(manifest: Any) -> Any:
        at(f"half of {manifest.kind}")
        return mapped(manifest)

    regions._mapped = half_pulled


if cell():
    install()
