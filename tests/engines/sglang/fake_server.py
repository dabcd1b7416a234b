"""Stands in for the engine's Python: answers like `gyre_hpc.engines.sglang.server`, with a child that no signal but KILL ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def main() -> None:
    if "--api-key-stdin" in sys.argv:
        sys.stdin.read()
    child = subprocess.Popen([os.environ["REAL_PYTHON"], "-c", STUBBORN])
    port_file = Path(sys.argv[sys.argv.index("--port-file") + 1])
    Path(os.environ["SEEN"]).write_text(f"{child.pid} {os.environ['PYTHONPATH']}")
    port_file.with_suffix(".part").write_text("127.0.0.1 1\n")
    port_file.with_suffix(".part").rename(port_file)
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    time.sleep(600)


if __name__ == "__main__":
    main()
