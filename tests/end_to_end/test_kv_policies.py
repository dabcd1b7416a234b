"""A publication under a running call, with both KV policies: `strict` cuts it and goes on under the new key,
`keep_execution` leaves it where it is. Which weights computed what is checked by log-probs, against transformers.

The engine of the satellite is stopped (SIGSTOP) under the call until the publication has come to it, so that the call is
neither over nor out of reach of the publication, however slow the machine.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gyre_hpc.controller.journal.entries import Direction, SwitchStep
from gyre_hpc.gateway.logged_call import LoggedCall
from gyre_hpc.records import CallRecord, Version
from gyre_hpc.report import metrics as m
from gyre_hpc.shards.reader import open_shards
from gyre_hpc.shards.stats import stats
from gyre_hpc.transport.messages import StepName
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import Plan, Run
from tests.end_to_end.talker import write_talker
from tests.end_to_end.test_kills import recent_calls

pytestmark = pytest.mark.filterwarnings(
    "ignore:`past_key_values`"
)  # renamed in some releases of transformers

Floats = npt.NDArray[np.float32]
PAGE = 16
LONG = 48
"""Tokens of the first call of executions 2 and 3: group 1, open while group 0 is trained."""
DECOY, SUBJECT = 2, 3
LATER = 4
"""The first execution dispatched after the first publication."""
NEAR = 2e-5
"""Largest difference of a recorded log-prob to that of the same tokens and weights in transformers."""

GROUPS_OF_TWO = (
    "schedule.steps=3",
    "schedule.batch_groups=1",
    "schedule.executions_per_group=2",
    "schedule.extra_dispatch=1",
    "trainer.keep_checkpoints=9",
    "trainer.learning_rate=0.0002",
    "objective.replay_weight=0",
    f"engine.page_tokens={PAGE}",
    "engine.tokens_per_s=40",
    f"gateway.max_output_tokens={LONG}",
)


@dataclass
class Ran:
    """What a run left: calls by execution, in order."""

    run: Run
    calls: dict[int, list[CallRecord]]

    def ended(self, execution: int) -> m.Ended:
        return next(line for line in self.run.metrics(m.Ended) if line.execution == execution)

    def weights(self, version: int) -> Path:
        return self.run.layout.checkpoint(Version(version)) if version else self.run.layout.model


def publish_under_a_call(start: Start, folder: Path, kv_policy: str) -> Ran:
    """A run in which the satellite's engine samples call 0 of SUBJECT when version 1 comes to it."""
    plan = Plan(folder / "plan", hold=range(4), first={DECOY: LONG, SUBJECT: LONG})
    model = write_talker(folder / "model")
    run = start(*plan.overrides, *GROUPS_OF_TWO, f"engine.kv_policy={kv_policy}", f"model.path={model}")
    until_both_serve(run)
    with_subject, without = run.engine(1), run.engine(0)
    plan.release(DECOY)
    until_sampling(run, DECOY)
    without.suspend()
    plan.release(SUBJECT)
    until_sampling(run, SUBJECT)
    with_subject.suspend()
    without.resume()
    for execution in (0, 1):
        plan.release(execution)
        run.until(f"the end of execution {execution}", lambda e=execution: e in run.outcomes())
    run.until_entry(SwitchStep, lambda step: reaches_the_calls(step, kv_policy))
    with_subject.resume()
    run.finish()
    calls: dict[int, list[CallRecord]] = {}
    for shard in open_shards(run.folder):
        for index in range(len(shard)):
            record = shard.record(index)
            calls[record.execution] = sorted(record.strands.records(), key=lambda call: call.ordinal)
    return Ran(run, calls)


def until_both_serve(run: Run) -> None:
    """Else both calls may go to the cell that is up first."""

    def serving() -> bool:
        return {line.cell for line in run.metrics(m.RoleChange) if line.role == "rollout"} == {0, 1}

    run.until("both cells", serving)


def until_sampling(run: Run, execution: int) -> None:
    def sampled() -> list[LoggedCall]:
        return [call for call in recent_calls(run) if call.opened.execution == execution and call.ids]

    run.until(f"tokens of execution {execution}", sampled)


def reaches_the_calls(step: SwitchStep, kv_policy: str) -> bool:
    """What comes next in the publication is asked of the engine itself: to pause, or to cut its call."""
    last = StepName.WRITE if kv_policy == "keep_execution" else StepName.DRAIN
    return (step.direction, step.cell, step.step) == (Direction.PUBLICATION, 1, last)


class Oracle:
    """Log-probs of an execution's calls, with KV as each policy has it: transformers on the run's weights."""

    def __init__(self, ran: Ran) -> None:
        from transformers import DynamicCache, Qwen3ForCausalLM

        self._cache = DynamicCache()
        self._load = lambda version: Qwen3ForCausalLM.from_pretrained(
            ran.weights(version), dtype=torch.float32
        )

    def kept(self, call: CallRecord, cached: int) -> Floats:
        """Of the output, on the KV of its first `cached` tokens as earlier calls left it, and the KV it adds itself.

        A token's KV is computed as the next one is sampled, by the weights that sample it, and stays.
        """
        ids, prompt = [*call.prompt_ids.tolist(), *call.output_ids.tolist()], len(call.prompt_ids)
        if excess := self._cache.get_seq_length() - cached:
            self._cache.crop(-excess)
        found: list[Floats] = []
        begin = cached
        for version in sorted(set(call.versions.tolist())):
            end = prompt - 1 + int((call.versions <= version).sum())
            with torch.no_grad():
                out = self._load(version)(torch.tensor([ids[begin:end]]), past_key_values=self._cache)
            first = max(begin, prompt - 1)
            found.append(chosen(out.logits[0, first - begin :], ids[first + 1 : end + 1]))
            begin = end
        return np.concatenate(found)

    def fresh(self, call: CallRecord) -> Floats:
        """Of the output, each token on KV that its own weights have computed from the start."""
        ids, prompt = [*call.prompt_ids.tolist(), *call.output_ids.tolist()], len(call.prompt_ids)
        found = np.zeros(len(call.output_ids), np.float32)
        for version in set(call.versions.tolist()):
            with torch.no_grad():
                out = self._load(version)(torch.tensor([ids[:-1]]))
            here = call.versions == version
            found[here] = chosen(out.logits[0, prompt - 1 :], ids[prompt:])[here]
        return found


def chosen(logits: torch.Tensor, ids: list[int]) -> Floats:
    """Log-probs [T] of `ids` under `logits` [T, vocabulary]."""
    return logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].numpy()  # type: ignore[no-any-return]


def distance(call: CallRecord, expected: Floats) -> float:
    return float(np.abs(expected - call.logprobs).max())


def check_laws(ran: Ran) -> None:
    check_agreement(ran.run)
    assert ran.run.versions() == [1, 2, 3] and ran.run.summary()["calls_lost"] == 0
    assert stats(ran.run.folder).forks_by_reason == {}
    for calls in ran.calls.values():
        for before, after in itertools.pairwise(calls):
            said = [*before.prompt_ids.tolist(), *before.output_ids.tolist()]
            assert after.prompt_ids.tolist()[: len(said)] == said, "what was said stays as it was sampled"
    first = ran.calls[SUBJECT][0]
    assert {0, 1} <= set(first.versions.tolist()) and len(first.output_ids) == LONG
    assert first.versions.tolist() == sorted(first.versions.tolist())
    for call in ran.calls[LATER]:
        assert 0 not in call.versions and call.kv_version == call.versions[0], "a new execution, new weights"


def check_kept(ran: Ran) -> None:
    """The call was not cut, its KV stayed, and the next call of the execution went on with it."""
    first, second = ran.calls[SUBJECT]
    account, summary, oracle = ran.ended(SUBJECT), ran.run.summary(), Oracle(ran)
    assert (account.calls_rerouted, account.tokens_recomputed) == (0, 0)
    assert distance(first, oracle.kept(first, 0)) < NEAR < 100 * NEAR < distance(first, oracle.fresh(first))
    said = len(first.prompt_ids) + len(first.output_ids) - 1
    cached = min(said, len(second.prompt_ids) - 1) // PAGE * PAGE
    assert account.tokens_cached == cached
    assert distance(second, oracle.kept(second, cached)) < NEAR < distance(second, oracle.fresh(second))
    assert (first.kv_version, second.kv_version, account.kv_lag) == (0, 0, second.versions[-1])
    behind = [*first.versions.tolist(), *second.versions.tolist()]
    assert account.tokens_on_old_kv == sum(version > 0 for version in behind)
    assert summary["publication_cuts"] == 0 and summary["calls_over_versions"] >= 1
    assert summary["tokens_on_old_kv"] >= account.tokens_on_old_kv > 0


def check_cut(ran: Ran) -> None:
    """The call was cut, once per publication that met it, and went on with no KV but that of the weights it is sampled from."""
    first, second = ran.calls[SUBJECT]
    account, summary, oracle = ran.ended(SUBJECT), ran.run.summary(), Oracle(ran)
    cuts = len(set(first.versions.tolist())) - 1
    own = int((first.versions < first.versions[-1]).sum())
    assert account.calls_rerouted == 1 and account.tokens_recomputed >= own, "nobody else has computed these"
    for call in (first, second):
        assert distance(call, oracle.fresh(call)) < NEAR
        assert call.kv_version == call.versions[-1]
    assert summary["publication_cuts"] >= cuts and summary["calls_over_versions"] >= 1
    assert summary["kv_lag"] == summary["tokens_on_old_kv"] == 0


def test_a_publication_leaves_a_call_its_kv_or_cuts_it_by_policy(start: Start, tmp_path: Path) -> None:
    keep = publish_under_a_call(start, tmp_path / "keep", "keep_execution")
    strict = publish_under_a_call(start, tmp_path / "strict", "strict")
    check_laws(keep)
    check_laws(strict)
    check_kept(keep)
    check_cut(strict)
    assert keep.ended(1).tokens_cached < strict.ended(1).tokens_cached, (
        "its group's prompt is shared, or is not"
    )
    assert "calls met by a publication" in keep.run.layout.report.read_text()
