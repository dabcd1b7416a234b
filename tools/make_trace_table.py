"""Write conf/traces/terminal_bench.csv from the trials table of agent runs: python tools/make_trace_table.py TRIALS.csv

TRIALS.csv has columns run, task, agent_s (measurements taken from laude-institute/terminal-bench-leaderboard at 8e1925a3).
Kept are runs with at least 60 tasks of 5 timed trials; run and task become indices, seconds are rounded to tenths.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "conf" / "traces" / "terminal_bench.csv"
TRIALS = 5
LEAST_TASKS = 60

Runs = dict[str, dict[str, list[float]]]


def complete_runs(trials: Path) -> Runs:
    """Seconds of the first 5 trials of each complete task of each large enough run."""
    runs: Runs = defaultdict(lambda: defaultdict(list))
    with trials.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["agent_s"]:
                runs[row["run"]][row["task"]].append(float(row["agent_s"]))
    complete = {
        run: {task: seconds[:TRIALS] for task, seconds in tasks.items() if len(seconds) >= TRIALS}
        for run, tasks in runs.items()
    }
    return {run: tasks for run, tasks in complete.items() if len(tasks) >= LEAST_TASKS}


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    runs = complete_runs(Path(sys.argv[1]))
    tasks = sorted({task for run in runs.values() for task in run})
    with TARGET.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("run", "query", "seconds"))
        for index, run in enumerate(sorted(runs)):
            for task in sorted(runs[run]):
                for seconds in runs[run][task]:
                    rows.writerow((index, tasks.index(task), f"{seconds:.1f}"))
    print(f"{TARGET}: {len(runs)} runs, {len(tasks)} queries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
