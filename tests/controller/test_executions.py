"""The execution table: every execution is launched once, terminated once, and has one outcome."""

from __future__ import annotations

import dataclasses

from gyre_hpc.controller.executions.executions import MAX_ATTEMPTS, Execution, ExecutionHooks, ExecutionTable
from gyre_hpc.controller.executions.walltime import HOLD, Permit
from gyre_hpc.records import Assessment, ClosingReason, ExecutionId, GroupId
from gyre_hpc.transport import messages as msg

ID = ExecutionId(5)


class World:
    """An execution table whose messages and reports are kept."""

    def __init__(self) -> None:
        self.runner: list[msg.Message] = []
        self.gateway: list[msg.Message] = []
        self.launched: list[int] = []
        self.terminated: list[tuple[int, ClosingReason]] = []
        self.outcomes: list[msg.ExecutionOutcome] = []
        self.url = "http://gateway"
        self.table = ExecutionTable(
            ExecutionHooks(
                runner=self.runner.append,
                gateway=self.gateway.append,
                key=lambda id, attempt: f"key-{id}-{attempt}",
                gateway_url=lambda: self.url,
                harness_seed=int,
                opened=lambda execution: None,
                closed=lambda closed: None,
                launched=self.launched.append,
                terminated=lambda id, reason: self.terminated.append((id, reason)),
                sealed=lambda sealed: None,
                outcome=self._outcome,
            )
        )
        self.table.register(ID, GroupId(1), "patchkit:1")

    def _outcome(self, execution: Execution) -> None:
        assert execution.outcome is not None
        self.outcomes.append(execution.outcome)

    def run_to_close(self, reason: ClosingReason = ClosingReason.COMPLETED, attempt: int = 1) -> None:
        self.table.started(msg.ExecutionStarted(ID, attempt))
        self.table.closed(msg.ExecutionClosed(ID, attempt, reason, 3.0, 0, ""))

    def seal(
        self,
        *,
        calls: int = 4,
        lost: int = 0,
        incomplete: bool = False,
        attempt: int = 1,
        law_breaks: int = 0,
    ) -> None:
        self.table.gateway_sealed(
            msg.ExecutionSealed(
                ID, attempt, calls, 0, lost, 10, 0, 100, 0.0, incomplete, False, law_breaks=law_breaks
            )
        )

    def assess(self, score: float | None = 0.5, attempt: int = 1) -> None:
        assessment = Assessment(score, score is not None, "ok" if score is not None else "evaluator timeout")
        self.table.assessed(msg.ExecutionAssessed(ID, attempt, assessment))


def test_a_completed_execution_is_scored() -> None:
    world = World()
    world.table.launch(ID)
    world.run_to_close()
    world.seal()
    assert world.terminated == [(ID, ClosingReason.COMPLETED)] and not world.outcomes
    world.assess(0.5)
    [outcome] = world.outcomes
    assert outcome.assessment is not None and outcome.assessment.score == 0.5


def test_the_harness_gets_a_url_with_its_key() -> None:
    world = World()
    world.table.launch(ID)
    [start] = [item for item in world.runner if isinstance(item, msg.StartExecution)]
    assert start.base_url == "http://gateway/x/key-5-1"


def test_repeated_messages_change_nothing() -> None:
    world = World()
    world.table.launch(ID)
    for _ in range(2):
        world.run_to_close()
        world.seal()
        world.assess()
    assert (world.launched, len(world.terminated), len(world.outcomes)) == ([ID], 1, 1)


def test_zero_model_calls_is_infrastructure_and_excluded() -> None:
    world = World()
    world.table.launch(ID)
    world.run_to_close()
    world.seal(calls=0)
    world.assess(0.0)
    [outcome] = world.outcomes
    assert (outcome.reason, outcome.assessment) == (ClosingReason.INFRASTRUCTURE, None)


def test_a_lost_call_excludes_the_execution() -> None:
    world = World()
    world.table.launch(ID)
    world.run_to_close()
    world.seal(lost=1)
    world.assess()
    assert world.outcomes[0].assessment is None


def test_a_broken_token_law_excludes_the_execution_and_is_its_reason() -> None:
    world = World()
    world.table.launch(ID)
    world.run_to_close()
    world.seal(law_breaks=1)
    world.assess()
    assert (world.outcomes[0].reason, world.outcomes[0].assessment) == (ClosingReason.TOKEN_LAW, None)


def test_incomplete_records_are_never_trained() -> None:
    world = World()
    world.table.launch(ID)
    world.run_to_close()
    world.seal(incomplete=True)
    world.assess()
    assert world.outcomes[0].incomplete and world.outcomes[0].assessment is None


def test_an_overall_timeout_needs_no_assessment() -> None:
    world = World()
    world.table.launch(ID)
    world.run_to_close(ClosingReason.OVERALL_TIMEOUT)
    world.seal()
    assert world.outcomes[0].reason is ClosingReason.OVERALL_TIMEOUT


def test_an_invalid_assessment_is_kept_and_is_not_a_zero() -> None:
    world = World()
    world.table.launch(ID)
    world.run_to_close()
    world.seal()
    world.assess(None)
    assessment = world.outcomes[0].assessment
    assert assessment is not None and assessment.score is None and not assessment.valid


def test_a_withdrawn_queued_execution_terminates_without_a_launch() -> None:
    world = World()
    world.table.withdraw(ID)
    assert not world.runner and world.terminated == [(ID, ClosingReason.CANCELLED_SURPLUS)]


def test_after_the_runners_death_a_running_attempt_is_repeated_and_the_ledger_stands() -> None:
    world = World()
    world.table.launch(ID)
    world.table.started(msg.ExecutionStarted(ID, 1))
    world.table.runner_lost()
    assert world.table.executions[ID].attempt == 2
    world.run_to_close(attempt=1)
    assert not world.terminated
    world.run_to_close(attempt=2)
    world.seal(attempt=2)
    assert (world.launched, world.terminated) == ([ID], [(ID, ClosingReason.COMPLETED)])


def test_after_the_runners_death_a_closed_attempt_is_only_assessed_again() -> None:
    world = World()
    world.table.launch(ID)
    world.run_to_close()
    world.seal()
    world.table.runner_lost()
    assert isinstance(world.runner[-1], msg.AssessExecution)
    assert world.table.executions[ID].attempt == 1


def test_attempts_are_bounded() -> None:
    world = World()
    world.table.launch(ID)
    for _ in range(MAX_ATTEMPTS):
        world.table.runner_lost()
    assert world.outcomes[0].reason is ClosingReason.INFRASTRUCTURE


def test_a_launch_waits_for_a_gateway() -> None:
    world = World()
    world.url = ""
    world.table.launch(ID)
    assert not world.runner and world.table.executions[ID].attempt == 0
    world.url = "http://second"
    world.table.gateway_up()
    [start] = [item for item in world.runner if isinstance(item, msg.StartExecution)]
    assert start.base_url == "http://second/x/key-5-1"


def test_when_runner_and_gateway_die_together_an_execution_is_repeated_once() -> None:
    world = World()
    world.table.launch(ID)
    world.url = ""
    world.table.runner_lost()
    world.url = "http://second"
    world.table.gateway_lost()
    world.table.gateway_up()
    assert world.table.executions[ID].attempt == 2


def test_an_attempt_that_the_dead_gateway_had_not_sealed_is_repeated() -> None:
    world = World()
    world.table.launch(ID)
    world.run_to_close()
    world.table.gateway_lost()
    assert world.table.executions[ID].attempt == 2 and not world.terminated


def test_a_withdrawn_launch_that_waits_for_a_gateway_never_starts() -> None:
    world = World()
    world.url = ""
    world.table.launch(ID)
    world.table.withdraw(ID)
    world.url = "http://second"
    world.table.gateway_up()
    assert not world.runner and world.terminated == [(ID, ClosingReason.CANCELLED_SURPLUS)]


def test_a_withdrawn_execution_is_not_repeated_after_the_runners_death() -> None:
    world = World()
    world.table.launch(ID)
    world.table.started(msg.ExecutionStarted(ID, 1))
    world.table.withdraw(ID)
    world.table.runner_lost()
    assert world.outcomes[0].reason is ClosingReason.CANCELLED_SURPLUS
    assert world.table.executions[ID].attempt == 1


def test_an_execution_that_was_terminated_without_a_record_keeps_its_reason() -> None:
    world = World()
    execution = world.table.executions[ID]
    execution.attempt, execution.launched, execution.terminated = 1, True, True
    world.table.close_again(execution, ClosingReason.OVERALL_TIMEOUT)
    assert world.outcomes[0].reason is ClosingReason.OVERALL_TIMEOUT
    assert world.runner == [msg.ForgetExecution(ID)]


def test_what_does_not_fit_is_held_and_tried_again() -> None:
    world, permits = World(), [HOLD, HOLD, HOLD, Permit(True, 20.0), Permit(True, 20.0)]
    world.table.hooks = dataclasses.replace(world.table.hooks, permit=lambda: permits.pop(0))
    world.table.launch(ID)
    world.table.launch_held()
    assert world.runner == world.gateway == [] and list(world.table.held) == [ID]
    world.table.launch_held()
    world.table.launch_held()
    (start,) = [message for message in world.runner if isinstance(message, msg.StartExecution)]
    assert start.walltime_s == 20.0 and not world.table.held


def test_a_held_execution_that_is_surplus_never_starts() -> None:
    world = World()
    world.table.hooks = dataclasses.replace(world.table.hooks, permit=lambda: HOLD)
    world.table.launch(ID)
    world.table.withdraw(ID)
    assert world.terminated == [(ID, ClosingReason.CANCELLED_SURPLUS)] and not world.table.held


def test_an_attempt_that_was_interrupted_is_repeated() -> None:
    world = World()
    world.table.launch(ID)
    world.table.started(msg.ExecutionStarted(ID, 1))
    world.table.interrupted(msg.ExecutionInterrupted(ID, 1))
    world.table.interrupted(msg.ExecutionInterrupted(ID, 1))
    assert world.table.executions[ID].attempt == 2 and world.launched == [ID] and not world.outcomes


def test_attempts_of_earlier_jobs_do_not_use_up_those_of_this_one() -> None:
    world = World()
    world.table.executions[ID].attempt = MAX_ATTEMPTS + 3
    world.table.launch(ID)
    world.table.runner_lost()
    assert world.table.executions[ID].attempt == MAX_ATTEMPTS + 5 and not world.outcomes
