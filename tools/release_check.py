"""The learning claim, checked before a release: python tools/release_check.py [--seeds 3] [--root DIR].

Runs `gyre train experiment=quickstart seed=S` for untouched seeds, one after another on a machine that should have nothing
else to do, and prints one line per run. Exits 1 unless every held-out score rises by MIN_GAIN. CI does not run this:
a score under load says little about the code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MIN_GAIN = 0.25
MAX_WALL_S = 720.0
FIRST_SEED = 100
"""Seeds from here on were never used for tuning."""


def one_run(seed: int, root: Path, overrides: list[str]) -> dict[str, float]:
    """Train with this seed; returns its summary. Raises CalledProcessError when the run fails."""
    command = [sys.executable, "-m", "gyre_hpc.cli", "train", "experiment=quickstart"]
    subprocess.run([*command, f"seed={seed}", f"root={root}", f"name=seed-{seed}", *overrides], check=True)
    [run] = root.glob(f"seed-{seed}-*")
    summary: dict[str, float] = json.loads((run / "summary.json").read_text())
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--root", type=Path, help="folder for the runs (default: a temporary one, kept)")
    parser.add_argument("overrides", nargs="*", help="further overrides of the runs")
    given = parser.parse_args()
    root = given.root or Path(tempfile.mkdtemp(prefix="gyre-release-"))
    passed = True
    rows = []
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        summary = one_run(seed, root, given.overrides)
        gain = summary["score_after"] - summary["score_before"]
        good = gain >= MIN_GAIN
        passed &= good
        rows.append(
            f"seed {seed}: {summary['score_before']:.3f} -> {summary['score_after']:.3f} (gain {gain:+.3f},"
            f" se {summary['score_se']:.3f}, {summary['steps']} steps, {summary['wall_s']:.0f} s"
            f"{'' if summary['wall_s'] <= MAX_WALL_S else ', over 12 minutes'}) {'ok' if good else 'TOO LITTLE'}"
        )
        print(rows[-1], flush=True)
    print(f"\n{root}\n" + "\n".join(rows))
    return not passed


if __name__ == "__main__":
    sys.exit(main())
