"""`gyre doctor`: what this site can do and what to fix, as findings in a fixed order.

All checks run at once, each in a thread that only waits for commands with deadlines, so that a Slurm that does not answer
costs one deadline and not one per command. Called by the command line; `inside` is what a node of the acceptance job looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from gyre_hpc.launch.doctor import machine, slurm
from gyre_hpc.launch.doctor.ask import probe
from gyre_hpc.launch.doctor.probes import Accepted
from gyre_hpc.launch.doctor.site import Finding, Site, State, fault, ok, warning

Check = Callable[[], Sequence[Finding]]
ACCEPT: Final = "sbatch -N2 slurm/accept.sbatch"


def examine(root: Path, accepted: Path) -> list[Finding]:
    """All findings for runs below `root`; `accepted` is the folder that may hold `site.json`."""
    several = slurm.several_nodes()
    return run_checks(
        [
            machine.check_python,
            machine.check_torch,
            partial(machine.check_storage, root, several),
            machine.check_sandbox,
            machine.check_limits,
            machine.check_shm,
            machine.check_environment,
            slurm.check_commands,
            slurm.check_slurm,
            machine.check_containers,
            slurm.check_pyxis,
            partial(check_accepted, accepted, several),
        ]
    )


def inside(root: Path) -> list[Finding]:
    """What a compute node alone can tell; that `root` is shared is told by its meeting the others there."""
    return run_checks(
        [
            machine.check_python,
            machine.check_torch,
            partial(machine.check_storage, root, False),
            machine.check_sandbox,
            machine.check_limits,
            machine.check_shm,
        ]
    )


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        return [finding for found in pool.map(lambda check: check(), checks) for finding in found]


def check_accepted(folder: Path, several_nodes: bool) -> list[Finding]:
    """What the last acceptance job found, at most as many lines as it has troubles."""
    found = machine.answered(probe("accepted", str(folder)), Accepted)
    if isinstance(found, str) or found.why:
        why = found if isinstance(found, str) else found.why
        return [fault("accepted", why, f"{ACCEPT} writes it again; another folder: --accepted FOLDER")]
    if found.site is not None:
        return judge_accepted(found.site)
    if not several_nodes:
        return []
    return [
        warning("accepted", f"no site.json in {folder}: nothing is known of nodes and the network", ACCEPT)
    ]


def judge_accepted(site: Site) -> list[Finding]:
    troubles = [finding for finding in site.findings if finding.state is not State.OK]
    text = f"{site.time} from {site.host}: {len(site.findings)} findings, transport {site.transport}"
    return [ok("accepted", text), *troubles]


def faults(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.state is State.FAULT]
