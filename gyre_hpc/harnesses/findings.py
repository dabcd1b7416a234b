"""What a run of a harness shows, one finding per question, in the order in which one would look for the cause. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gyre_hpc.harnesses import script
from gyre_hpc.harnesses.check import Outcome, Trial
from gyre_hpc.records import Delivery, LeafRole

GENERATIONS = ("/messages", "/chat/completions", "/responses")


@dataclass(frozen=True)
class Finding:
    """One thing that works, or does not."""

    what: str
    works: bool
    detail: str


def judge(outcome: Outcome, trial: Trial, dialect: str) -> Iterator[Finding]:
    """All findings."""
    yield _starts(outcome)
    yield _dialect(outcome, dialect)
    yield _tool(outcome)
    yield _file(outcome)
    yield _alive(outcome, trial)
    yield _answer(outcome)
    yield _recorded(outcome)
    yield _roles(outcome)
    yield _network(outcome)
    yield _exit(outcome)


def _starts(outcome: Outcome) -> Finding:
    if not outcome.requests:
        return Finding("starts", False, "sent no request")
    first = outcome.requests[0]
    return Finding("starts", True, f"first request after {first.after_s:.1f} s: {first.method} {first.path}")


def _dialect(outcome: Outcome, dialect: str) -> Finding:
    spoken = sorted({record.dialect for record in outcome.records})
    strange = sorted({f"{seen.method} {seen.path}" for seen in outcome.requests if seen.status == 404})
    detail = ", ".join(spoken) or "no model call came"
    if strange:
        detail += f"; asked in vain for {', '.join(strange)}"
    return Finding("dialect", spoken == [dialect], detail)


def _tool(outcome: Outcome) -> Finding:
    engine = outcome.engine
    if not engine.tool:
        return Finding("tool call", False, "no tool that takes a shell command was offered")
    back = engine.results_seen > 0
    return Finding("tool call", back, f"{engine.tool}: {'its result' if back else 'no result'} came back")


def _file(outcome: Outcome) -> Finding:
    path = outcome.workspace / script.FILE
    right = path.is_file() and path.read_text() == script.CONTENT
    return Finding(
        "file changed", right, f"{script.FILE} {'is' if right else 'is not'} in the workspace as asked"
    )


def _alive(outcome: Outcome, trial: Trial) -> Finding:
    asked = sum(seen.method == "POST" and seen.path.endswith(GENERATIONS) for seen in outcome.requests)
    repeated = asked - len(outcome.records)
    survived = bool(outcome.records) and repeated == 0 and outcome.records[0].delivery is Delivery.COMPLETE
    detail = f"{trial.silence_s:g} s of silence with a keep-alive every {trial.keepalive_s:g} s"
    return Finding(
        "keep-alive", survived, f"{detail}: {'survived' if survived else f'{repeated} requests repeated'}"
    )


def _answer(outcome: Outcome) -> Finding:
    there = script.FINAL_WORD in outcome.output
    return Finding("answer", there, f"{'stands' if there else 'does not stand'} in the harness's output")


def _recorded(outcome: Outcome) -> Finding:
    """Every call delivered, and every echoed turn spliced in recorded ids."""
    records = outcome.records
    whole = all(record.delivery is Delivery.COMPLETE for record in records)
    forks = ", ".join(f"{reason} {count}" for reason, count in outcome.forks.items()) or "none"
    works = bool(records) and whole and not outcome.forks
    return Finding("recorded", works, f"calls: {len(records)}; turns not known by their ids: {forks}")


def _roles(outcome: Outcome) -> Finding:
    """The scripted agent is the main agent: its calls, and no others, count as that."""
    roles = Counter(record.role_hint for record in outcome.records)
    detail = ", ".join(f"{role.value} {count}" for role, count in roles.items()) or "no model call came"
    works = 0 < roles[LeafRole.MAIN] == outcome.engine.task_calls
    return Finding(
        "roles",
        works,
        detail if works else f"{detail}; {outcome.engine.task_calls} calls were the main agent's",
    )


def _network(outcome: Outcome) -> Finding:
    if outcome.network:
        return Finding("network", True, f"not checked: {outcome.network}")
    return Finding("network", True, "had none but the gateway")


def _exit(outcome: Outcome) -> Finding:
    if outcome.exit_code is None:
        return Finding("exit", False, f"did not end: stopped after {outcome.wall_s:.0f} s")
    detail = f"exit code {outcome.exit_code} after {outcome.wall_s:.1f} s"
    return Finding("exit", outcome.exit_code == 0, detail)
