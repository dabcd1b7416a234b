"""The tightest limit binds, and a refusal names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.cells.memory_ledger import MIB, Available, MemoryLedger, MemoryShort, available


def machine(folder: Path, free_mib: int, limits: dict[str, tuple[str, int]]) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup whose groups have (memory.max, memory.current in MiB)."""
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {free_mib << 10} kB\n")
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    for name, (most, used) in limits.items():
        (cgroup / name).mkdir(parents=True, exist_ok=True)
        (cgroup / name / "memory.max").write_text(most + "\n")
        (cgroup / name / "memory.current").write_text(f"{used * MIB}\n")
    return proc, cgroup


def test_the_tightest_of_machine_and_cgroups_counts(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, 500, {"job/step": ("max", 10), "job": (str(300 * MIB), 200)})
    room = available(cgroup, proc)
    assert (room.bytes, room.limit) == (100 * MIB, f"{cgroup}/job/memory.max")
    (cgroup / "job" / "memory.stat").write_text(f"anon 5\ninactive_file {50 * MIB}\n")
    assert available(cgroup, proc).bytes == 150 * MIB
    (proc / "meminfo").write_text(f"MemAvailable: {20 << 10} kB\n")
    assert available(cgroup, proc).limit == "MemAvailable of the machine"


def test_this_machine_says_something() -> None:
    assert 0 < available().bytes < 1 << 60


def test_a_refusal_names_every_part() -> None:
    ledger = MemoryLedger(lambda: Available(10 * MIB, "the limit"))
    ledger.check("to_training", {"snapshot": 8 * MIB, "gradient": 8 * MIB}, freed=6 * MIB)
    with pytest.raises(
        MemoryShort, match=r"16 MiB .*snapshot 8 MiB, gradient 8 MiB.* the limit leaves 10 MiB and 5"
    ):
        ledger.check("to_training", {"snapshot": 8 * MIB, "gradient": 8 * MIB}, freed=5 * MIB)
