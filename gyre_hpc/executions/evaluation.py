"""The assessment of a preserved workspace, apart from the harness: own copy, own sandbox, own time limit, own retries.

Invalid is never 0: a missing, ambiguous, non-numeric or non-finite score, a score outside 0..1, a crash, a time-out or an
evaluator that cannot start gives no score, a reason and the evidence; each is tried again within the budget.
Hidden tests exist on disk only while an evaluator runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from gyre_hpc.errors import StorageFull
from gyre_hpc.executions.harness import program_folders
from gyre_hpc.executions.launcher import Launcher, LaunchFailed
from gyre_hpc.executions.sandbox import Sandbox
from gyre_hpc.executions.tasks import Task
from gyre_hpc.records import Assessment

log = logging.getLogger(__name__)

EVIDENCE_CHARACTERS = 2000
OUTPUT_BYTES = 1 << 20
"""Only so much of an evaluator's output is read."""
FILE_LIMIT_BYTES = 1 << 30
"""No file written under evaluation may be larger: the code under test is the policy's."""
BACK_OFF_S = 0.5
"""Pause before the second try; doubles for each further one."""


class Evaluator:
    """Assesses workspaces, `concurrent` at a time. `attempts` tries of at most `timeout_s` each."""

    def __init__(
        self,
        launcher: Launcher,
        sandbox: Sandbox,
        timeout_s: float,
        attempts: int,
        concurrent: int,
        back_off_s: float = BACK_OFF_S,
    ) -> None:
        self._launcher = launcher
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._attempts = max(1, attempts)
        self._back_off_s = back_off_s
        self._slots = asyncio.Semaphore(concurrent)

    async def assess(self, task: Task, folder: Path, within_s: float = math.inf) -> Assessment:
        """Score `folder`/workspace. `within_s` is what is left of the execution's overall limit."""
        try:
            async with asyncio.timeout(None if math.isinf(within_s) else max(0.0, within_s)):
                return await self._retried(task, folder)
        except TimeoutError:
            return invalid("overall limit reached before the assessment was done")

    async def _retried(self, task: Task, folder: Path) -> Assessment:
        assessment = invalid("not assessed")
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self._back_off_s * 2 ** (attempt - 1))
            async with self._slots:
                assessment = await self._once(task, folder)
            if assessment.valid:
                break
            log.warning(
                "%s: try %d of %d invalid: %s", folder, attempt + 1, self._attempts, assessment.reason
            )
        return assessment

    async def _once(self, task: Task, folder: Path) -> Assessment:
        scratch = folder / "evaluation"
        try:
            argv, lost = await asyncio.to_thread(_set_up, task, folder / "workspace", scratch)
            return await self._run(argv, scratch, lost)
        except LaunchFailed as error:
            return invalid("evaluator did not start", error.message)
        except OSError as error:
            return invalid("evaluator could not be set up", str(error))
        finally:
            await asyncio.to_thread(remove, scratch)

    async def _run(self, argv: list[str], scratch: Path, lost: list[str]) -> Assessment:
        workspace = scratch / "workspace"
        seen = str(self._sandbox.seen(workspace))
        spec = self._sandbox.command(
            [word.replace("{workspace}", seen) for word in argv],
            workspace=workspace,
            readonly=[scratch / "hidden", *program_folders(argv[0])],
            file_limit=FILE_LIMIT_BYTES,
        )
        out, err = scratch / "out", scratch / "err"
        process = await self._launcher.launch(spec, out, err)
        try:
            async with asyncio.timeout(self._timeout_s):
                code = await process.wait()
        except TimeoutError:
            return invalid(f"evaluator time-out ({self._timeout_s:g} s)", _evidence(out, err))
        finally:
            process.end()
            with contextlib.suppress(LaunchFailed):
                await process.wait()
        if code != 0:
            return invalid(f"evaluator crashed (exit code {code})", _evidence(out, err))
        assessment = read_score(_head(out).decode(errors="replace"))
        return (
            assessment
            if assessment.valid
            else invalid(assessment.reason, "\n".join([_evidence(out, err), *lost]))
        )


def invalid(reason: str, evidence: str = "") -> Assessment:
    """No score, and why."""
    return Assessment(None, False, reason, evidence[-EVIDENCE_CHARACTERS:])


def read_score(output: str) -> Assessment:
    """The verdict in an evaluator's output: exactly one line must be a JSON object with the key `score`."""
    verdicts = [verdict for line in output.splitlines() if (verdict := _verdict(line)) is not None]
    if len(verdicts) != 1:
        return invalid("no score line" if not verdicts else f"{len(verdicts)} score lines", output)
    score, evidence = verdicts[0]["score"], str(verdicts[0].get("evidence", ""))
    if isinstance(score, bool) or not isinstance(score, int | float):
        return invalid(f"score is not a number: {str(score)[:80]!r}", output)
    if not math.isfinite(score):
        return invalid(f"score is not finite: {score}", output)
    if not 0.0 <= score <= 1.0:
        return invalid(f"score is outside 0..1: {score}", output)
    return Assessment(float(score), True, "", evidence[:EVIDENCE_CHARACTERS])


def _verdict(line: str) -> dict[str, object] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "score" in value else None


def _set_up(task: Task, workspace: Path, scratch: Path) -> tuple[list[str], list[str]]:
    """Copy the workspace, write the hidden files; returns the evaluator's command and what could not be copied."""
    remove(scratch)
    hidden = scratch / "hidden"
    hidden.mkdir(parents=True)
    lost: list[str] = []
    try:
        shutil.copytree(workspace, scratch / "workspace", symlinks=True, ignore=_special)
    except shutil.Error as error:
        lost = [f"not copied: {why}" for _, _, why in error.args[0]]
    task.hidden(hidden)
    return task.evaluator(hidden), lost


def _special(folder: str, names: Iterable[str]) -> set[str]:
    """Sockets, pipes and devices: an evaluator has no use for them and copying one may block for ever."""
    with os.scandir(folder) as entries:
        usual = {entry.name for entry in entries if entry.is_symlink() or entry.is_file() or entry.is_dir()}
    return set(names) - usual


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(OUTPUT_BYTES)


def _evidence(out: Path, err: Path) -> str:
    return "\n".join(_head(path).decode(errors="replace").strip() for path in (out, err)).strip()


def remove(folder: Path) -> None:
    """Delete a folder that untrusted code has written, whatever the modes in it."""
    if not folder.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # a folder without write or search permission
        for parent, names, _ in os.walk(folder):
            for path in (os.path.join(parent, name) for name in names):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)


def save_assessment(assessment: Assessment, path: Path) -> None:
    """Write assessment.json, whole or not at all. Raises StorageFull."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(
            json.dumps({name: getattr(assessment, name) for name in assessment.__struct_fields__})
        )
        temporary.replace(path)
    except OSError as error:
        raise StorageFull(
            f"{path}: {error}", fix="free space on the run's filesystem, then resume"
        ) from error
