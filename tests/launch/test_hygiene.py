"""No process outlives who started it, and none is ended by its name: every place that starts one is known here."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
STARTS = {
    "Popen",
    "run",
    "check_output",
    "check_call",
    "call",
    "create_subprocess_exec",
    "create_subprocess_shell",
}
STARTS |= {
    "fork",
    "forkpty",
    "posix_spawn",
    "posix_spawnp",
    "system",
    "execv",
    "Process",
    "ProcessPoolExecutor",
}
MODULES = {"subprocess", "os", "psutil", "asyncio", "multiprocessing"}

PDEATHSIG, CHANNEL, WAITED = (
    "PR_SET_PDEATHSIG",
    "ends when its channel to the starter closes",
    "waited for, with a deadline",
)
HAND = "started by a person's command in the foreground"
KNOWN = {
    "launch/local.py": f"{PDEATHSIG}; one that outlives its controller ends itself (launch/nodes/watchdog.py)",
    "gateway/process.py": PDEATHSIG,
    "engines/process.py": PDEATHSIG,
    "executions/forkserver.py": PDEATHSIG,
    "executions/launcher.py": CHANNEL,
    "executions/patchkit/files/evaluate.py": "inside a launch of the fork server, which ends with its guard",
    "executions/reference_harness/agent.py": "inside a launch of the fork server, which ends with its guard",
    "controller/freeze.py": WAITED,
    "launch/job/broadcast.py": WAITED,
    "launch/job/unpack.py": WAITED,
    "launch/commands.py": WAITED,
    "launch/doctor/ask.py": WAITED,
    "launch/nodes/health.py": WAITED,
    "bench/gateway.py": HAND,
    "bench/mpi_pair.py": HAND,
    "bench/regions.py": HAND,
    "transport/mpi/local_pmi.py": "a world of one, whose end of the PMI socket closes with its starter; used outside Slurm",
    "harnesses/packages.py": HAND,
    "bench/paced.py": HAND,
}
"""How each module that starts processes sees to it that none is left behind."""


def starts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        module, called = ast.unparse(node.func.value).partition(".")[0], ast.unparse(node.func)
        if module in MODULES and node.func.attr in STARTS and called not in ("asyncio.run", "psutil.Process"):
            yield called


def test_every_place_that_starts_a_process_is_accounted_for() -> None:
    package = REPO / "gyre_hpc"
    found = Counter(str(path.relative_to(package)) for path in package.rglob("*.py") for _ in starts(path))
    assert found.keys() - KNOWN.keys() == set()


def test_nothing_is_killed_by_name() -> None:
    files = [path for folder in ("gyre_hpc", "slurm", "tools", "conf") for path in (REPO / folder).rglob("*")]
    texts = {
        path: path.read_text(errors="replace")
        for path in files
        if path.suffix in (".py", ".sh", ".sbatch", ".yaml")
    }
    assert [path for path, text in texts.items() if re.search(r"\b(pkill|killall|pgrep|pidof)\b", text)] == []
