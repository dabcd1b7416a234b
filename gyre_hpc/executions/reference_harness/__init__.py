"""The reference harness: `agent.py`, a program of its own that knows only a base URL.

Runs launch it; only the warm start imports it, to let a scripted demonstrator sit where the model sits."""

from pathlib import Path

PROGRAM = Path(__file__).parent / "agent.py"
"""Run as `python -I -S agent.py --base-url URL --workspace DIR --instruction TEXT ...`."""
