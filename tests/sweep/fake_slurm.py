"""Stand-ins for Slurm's commands: sbatch counts jobs up from 77, squeue and sacct answer from a file. Not a Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SBATCH = """\
cp "{manifest}" "{folder}/manifest.$(ls {folder}/*.script 2>/dev/null | wc -l)" 2>/dev/null
for word in $(cat {folder}/refuses 2>/dev/null); do
  grep -q -- "$word" "$1" && {{ echo "sbatch: error: $(cat {folder}/why) $word" >&2; exit 1; }}
done
job=$((77 + $(ls {folder}/*.script 2>/dev/null | wc -l)))
cp "$1" {folder}/$job.script; echo "Submitted batch job $job"
"""
ANSWER = """\
for job in $(echo "${{!#}}" | tr , ' '); do grep -s "^$job[+|]" {folder}/{name}.txt; done
"""


class FakeSlurm:
    """What the stand-ins are to say, and the scripts they took by job id."""

    def __init__(self, folder: Path, manifest: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        folder.mkdir()
        for name, body in (("srun", ""), ("sbatch", SBATCH), ("squeue", ANSWER), ("sacct", ANSWER)):
            program = folder / name
            program.write_text(
                "#!/bin/bash\n"
                + body.format(folder=folder, name=name, manifest=manifest)
                + "true\n" * (name != "sbatch")
            )
            program.chmod(0o755)
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def refuse(self, *words: str, why: str = "invalid") -> None:
        """sbatch refuses scripts with any of these words."""
        (self._folder / "why").write_text(why)
        (self._folder / "refuses").write_text(" ".join(words))

    def say(self, **lines: str) -> None:
        """What squeue or sacct prints of the jobs it is asked about, as in squeue="77|RUNNING"."""
        for name, text in lines.items():
            (self._folder / f"{name}.txt").write_text(text + "\n")

    def fail(self, name: str, words: str) -> None:
        """squeue or sacct refuses with these words."""
        (self._folder / name).write_text(f"#!/bin/bash\necho '{words}' >&2\nexit 1\n")

    @property
    def scripts(self) -> dict[str, str]:
        return {path.stem: path.read_text() for path in sorted(self._folder.glob("*.script"))}

    def manifest_before(self, number: int) -> str:
        """The sweep's manifest as it was when the job of this number, from 0, came."""
        return (self._folder / f"manifest.{number}").read_text()
