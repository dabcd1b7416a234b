"""The site's node health check, run on a cell's node before the cell starts (`cluster.health_probe`)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Final

from gyre_hpc.errors import NodeUnfit
from gyre_hpc.transport.hosts import node_name

PROBE_S: Final = 60.0
WORDS: Final = 400
"""Most characters of what the probe said last."""


def check_node(probe: Sequence[str]) -> None:
    """Raise NodeUnfit with the probe's last words if it fails, cannot be run, or takes more than PROBE_S."""
    if not probe:
        return
    try:
        done = subprocess.run(
            list(probe),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_S,
            check=False,
        )
        words = done.stdout.decode(errors="replace").strip()[-WORDS:]
        reason = "" if done.returncode == 0 else words or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"no end within {PROBE_S:g} s"
    except OSError as error:
        reason = str(error)
    if reason:
        raise NodeUnfit(f"{node_name()}: {probe[0]}: {reason}")
