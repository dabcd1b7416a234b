"""What a fresh processor is told: all that may still be trained, and every outcome that no shard holds."""

from __future__ import annotations

from gyre_hpc.controller.processing import Processing
from gyre_hpc.records import ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.schedule.state import Group
from gyre_hpc.transport import messages as msg

GROUP = Group(GroupId(1), Version(0), (ExecutionId(4), ExecutionId(5)))


class World:
    """A processing desk whose messages are kept."""

    def __init__(self) -> None:
        self.sent: list[msg.Message] = []
        self.desk = Processing(self.sent.append, lambda group: f"toy:{group}")

    def told(self) -> list[int]:
        """Executions whose outcomes were told, in order; forgets them."""
        ids = [int(message.execution) for message in self.sent if isinstance(message, msg.ExecutionOutcome)]
        self.sent.clear()
        return ids


def outcome(id: int, group: GroupId | None = None) -> msg.ExecutionOutcome:
    reason = ClosingReason.COMPLETED
    return msg.ExecutionOutcome(ExecutionId(id), 1, group, "toy:1", reason, 1.0, False, None)


def processed() -> msg.GroupProcessed:
    return msg.GroupProcessed(GROUP.id, 2, (0.0, 1.0), (), 10, 2, 0, "")


def test_an_outcome_is_told_again_until_a_shard_has_it() -> None:
    world = World()
    world.desk.outcome(outcome(9))
    assert world.told() == [9]
    world.desk.tell_again({}, {})
    assert world.told() == [9]
    world.desk.sealed([ExecutionId(9)])
    world.desk.tell_again({}, {})
    assert world.told() == []


def test_outcomes_of_a_live_group_are_told_once_each_after_the_group() -> None:
    world = World()
    known = {ExecutionId(4): outcome(4, GROUP.id)}
    world.desk.unsealed = {ExecutionId(4): known[ExecutionId(4)], ExecutionId(9): outcome(9)}
    world.desk.tell_again({GROUP.id: GROUP}, known)
    assert isinstance(world.sent[0], msg.ExpectGroup)
    assert world.told() == [4, 9]


def test_a_group_whose_micro_steps_lie_nowhere_is_asked_for_once() -> None:
    world = World()
    for _ in range(3):
        world.desk.publish_again(GROUP, {})
    assert [type(message) for message in world.sent] == [msg.DropGroup, msg.ExpectGroup]
    world.desk.take(processed())
    world.desk.publish_again(GROUP, {})
    assert len(world.sent) == 4


def test_a_group_that_left_the_schedule_is_dropped() -> None:
    world = World()
    world.desk.take(processed())
    world.desk.forget_all_but({GROUP.id: GROUP})
    assert not world.sent
    world.desk.forget_all_but({})
    assert world.sent == [msg.DropGroup(GROUP.id)]
