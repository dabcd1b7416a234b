"""On a node: unpack what the batch node packed. `python -m gyre_hpc.launch.job.unpack ARCHIVE SENT TARGET ...` (standard library only).

Of each three: SENT (the file that sbcast left here) is unpacked if it is as long as ARCHIVE (in the run folder), else
ARCHIVE itself is. TARGET appears whole, by a rename. Prints `unpacked NODE ok`, or why not, and ends with 0 either way:
one node must not end the step of the others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

LIMIT_S: Final = 900.0
"""Longest time of one archive, as the controller waits for it."""


def unpack(archive: Path, sent: Path, target: Path) -> str:
    """Why TARGET is not there; "" if it is."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        if target.is_dir():
            return ""
        if target.parent.is_symlink() or target.parent.stat().st_uid != os.getuid():
            return f"{target.parent} belongs to another user"
        whole = sent.is_file() and sent.stat().st_size == archive.stat().st_size
        partial.mkdir(mode=0o700)
        command = ["tar", "--no-same-owner", "-xf", str(sent if whole else archive), "-C", str(partial)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=LIMIT_S
        )
        if done.returncode != 0:
            return f"{target}: tar: {' '.join(done.stderr.split()[:30])}"
        partial.rename(target)
    except subprocess.TimeoutExpired:
        return f"{target}: tar has not ended after {LIMIT_S:g} s"
    except OSError as error:
        # a node that stands for several (slurmd -N) has it from the other one
        return "" if target.is_dir() else f"{error.filename or target}: {error.strerror}"
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            sent.unlink()
    return ""


def main(words: list[str]) -> int:
    paths = [Path(word) for word in words]
    faults = [unpack(*paths[index : index + 3]) for index in range(0, len(paths), 3)]
    outcome = next((fault for fault in faults if fault), "ok")
    sys.stdout.write(f"unpacked {os.environ.get('SLURMD_NODENAME', '-')} {outcome}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
