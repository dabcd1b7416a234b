"""What a test may need of the machine, and how to get it: one place for all skips."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
"""A busy machine, or the first draw of a fresh checkout (hypothesis then reads all sources), says nothing about a law."""


def _userns() -> bool:
    command = ["unshare", "-Urmpf", "--kill-child", "true"]
    return (
        shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
    )


def _gpu() -> bool:
    return (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


def _mpiexec() -> bool:
    return shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is not None


def sglang_python() -> Path:
    """Python of the environment that tools/setup_sglang.sh made."""
    folder = os.environ.get("GYRE_SGLANG", str(Path.home() / ".local/share/gyre/sglang-0.5.21"))
    return Path(folder) / "bin/python"


NIXL = ".venv/bin/pip install --no-deps nixl-cu12==1.5.1 (without its dependencies: it declares torch)"

NEEDS = {
    "slurm": (
        lambda: os.geteuid() == 0 and shutil.which("slurmctld") is not None,
        "as root: bash slurm/dev_cluster.sh install",
    ),
    "browser": (lambda: shutil.which("chromium") is not None, "apt-get install chromium"),
    "userns": (
        _userns,
        "sysctl -w kernel.unprivileged_userns_clone=1 (or run where user namespaces are allowed)",
    ),
    "npm": (lambda: shutil.which("npm") is not None, "apt-get install npm"),
    "root": (lambda: os.geteuid() == 0, "run as root"),
    "nixl": (lambda: any(importlib.util.find_spec(wheel) for wheel in ("nixl_cu12", "nixl_cu13")), NIXL),
    "mpi": (
        lambda: importlib.util.find_spec("mpi4py") is not None and _mpiexec(),
        ".venv/bin/pip install 'mpi4py>=4.0' 'mpich>=4.2' (the extra mpi)",
    ),
    "rdma": (
        lambda: Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()),
        "run on a node with an RDMA device (InfiniBand or RoCE); two nodes: sbatch -N2 slurm/accept.sbatch",
    ),
    "sglang": (
        lambda: (sglang_python().parents[1] / "installed").is_file(),
        "bash tools/setup_sglang.sh (2.8 GB; .ci/run --full does it)",
    ),
    "gpu": (_gpu, "run on a node with a CUDA device"),
}


FULL_TIMEOUT_S = 1800
"""For tests marked full, unless they name their own."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot do, naming the command that enables it; `full` runs only with GYRE_FULL=1."""
    cache: dict[str, bool] = {}
    for item in items:
        for mark, (available, enable) in NEEDS.items():
            if item.get_closest_marker(mark) is None:
                continue
            if mark not in cache:
                cache[mark] = available()
            if not cache[mark]:
                item.add_marker(pytest.mark.skip(reason=f"needs {mark}; enable: {enable}"))
        if item.get_closest_marker("full") is None:
            continue
        item.add_marker(pytest.mark.timeout(FULL_TIMEOUT_S))
        if not os.environ.get("GYRE_FULL"):
            item.add_marker(
                pytest.mark.skip(reason="long; enable: GYRE_FULL=1 tools/test.sh (or .ci/run --full)")
            )
