"""The reference harness: `agent.py`, a program of its own that knows only a base URL. Launched, never imported."""

from pathlib import Path

PROGRAM = Path(__file__).parent / "agent.py"
"""Run as `python -I -S agent.py --base-url URL --workspace DIR --instruction TEXT ...`."""
