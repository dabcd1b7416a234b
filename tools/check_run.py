"""Check the mechanism of a finished run: python tools/check_run.py RUN. Exits 1 and names what is wrong.

Scores are not asserted: a run of a few steps proves machinery, not learning (tools/release_check.py does that).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def complaints(run: Path) -> list[str]:
    """What a short elastic run must show, and does not."""
    if not (run / "summary.json").is_file():
        return ["summary.json (is this a run folder, and has the run ended?)"]
    summary = json.loads((run / "summary.json").read_text())
    report = run / "report.html"
    there_and_back = 2 * summary["steps"] - 1  # of the core: it need not return after the last step
    checks = {
        "optimizer steps": summary["steps"] > 0,
        "role switches": summary["role_switches"] >= there_and_back,
        "model calls": summary["calls"] > 0,
        "no lost calls": summary["calls_lost"] == 0,
        "tokens trained": summary["tokens_trained"] > 0,
        "a score before": summary["score_before"] is not None,
        "a score after": summary["score_after"] is not None,
        "idle share of rollout": "rollout" in summary["idle_share"],
        "idle share of training": "training" in summary["idle_share"],
        "completed executions": summary["executions"].get("completed", 0) > 0,
        "report.html": report.is_file() and report.stat().st_size > 100_000,
        "sealed shards": (run / "manifest.jsonl").is_file() and any((run / "shards").glob("*.h5")),
        "a checkpoint": any((run / "checkpoints").glob("v*")),
    }
    return [name for name, good in checks.items() if not good]


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python tools/check_run.py RUN")
        return 2
    run = Path(sys.argv[1])
    wrong = complaints(run)
    for name in wrong:
        print(f"{run}: missing or wrong: {name}")
    if not wrong:
        print(f"{run}: mechanism is sound")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
