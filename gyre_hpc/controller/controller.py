"""The controller: events in, decisions carried out, both journaled.

One queue brings everything peers do (`peers/`); `Driver` gives events to the schedule and journals each with its
decisions, which `decisions.py` carries out. Role switches (`cells/`), executions (`executions/`), optimizer steps
(`steps.py`, `training/`) and the processor's groups (`processing.py`) are message-driven state machines that
call back into `feed`. No step of them blocks. What a person sees is what `monitor/` tells. `assembly.py` has made and
wired all of them; here stands what happens, in which order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from gyre_hpc.controller.assembly import Assembly
from gyre_hpc.controller.context import RunContext
from gyre_hpc.controller.ending.ending import Ending
from gyre_hpc.controller.executions import resume
from gyre_hpc.controller.journal.entries import Resumed
from gyre_hpc.controller.journal.history import History
from gyre_hpc.controller.peers.adoption import Holdings
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.controller.reception import SERVICES
from gyre_hpc.errors import ScheduleStuck
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.state import GroupStatus
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind

TICK_S = 0.25


class Controller(Assembly):
    """One run under one epoch."""

    def __init__(self, context: RunContext, peers: Peers, history: History) -> None:
        super().__init__(context, peers, history)
        self._ticked_at = time.monotonic()

    async def run(self) -> Ending | None:
        """Serve until all steps are done (None) or the run ends early (why). Raises the taxonomy's errors."""
        self.peers.start_accepting()
        try:
            await self.departure.learn()
            await self._launch_all()
            self._begin(await self._survivors_heard())
            for inbound in self.survivors.heard:
                self.reception.note(inbound)
            await self._serve()
            ending = None if self._ended() else self.departure.ending
            if ending is not None:
                await self.leaving.save(self.departure.time_to_save())
                await self.departure.leave_successor()
        finally:
            self.processing.send(msg.Seal())
            if self.decisions.stop_reason is not None:
                self.guests.dismiss(self.decisions.stop_reason or "done")
            if self.external is not None and (self._ended() or self.departure.ending is None):
                self.peers.end_external(self.decisions.stop_reason or "done")
                await self.external.end()
            if self.channels is not None:
                await self.channels.close()
            why = str(self.departure.ending or self.decisions.stop_reason or "done")
            await self.peers.shut_down(why, self.departure.shutdown_within_s())
            await self.weights.tidied()
            await self.snapshots.written()
            self.journal.close()
            self.observer.close()
        if self.decisions.stop_reason and ending is None:
            raise ScheduleStuck(
                self.decisions.stop_reason, fix=f"see {self.context.layout.logs(self.context.epoch)}"
            )
        return ending

    async def _launch_all(self) -> None:
        """All processes; no cells for a run whose last outcomes alone are missing."""
        if self.channels is not None:
            await self.channels.start()
        for kind in SERVICES:
            if kind not in self.peers.survivors:
                await self.peers.launch(kind, 0)
        if self.decisions.stop_reason is None:
            for index in range(self.config.cluster.cells):
                cell = CellId(index)
                what = self.driver.state.settings.kind_of(cell)
                self.cells.add(cell, self.config.engine.capacity, known=self.history.fresh, kind=what)
                await self.peers.launch_first(PeerKind.CELL, index)

    async def _survivors_heard(self) -> Holdings:
        """What outlived the controller before this one; what said nothing of itself is ended and replaced."""
        expected = set(self.peers.survivors)
        holdings = await self.survivors.gather(self._may_wait)
        if self.external is None:
            for kind in sorted(expected - self.peers.survivors):
                await self.peers.replace(kind)
        return holdings

    def _may_wait(self) -> bool:
        if self.external is not None:
            self.external.check()
        return self.departure.ending is None

    def _begin(self, holdings: Holdings = resume.NOTHING) -> None:
        self.observer.opened(self.config.transport.kind)
        if self.history.fresh:
            if self.config.tasks.heldout:
                self.steps.evaluate(Version(0))
            self.feed(p.Started())
            return
        self.journal.append(Resumed(time.time(), self.context.epoch))
        self._go_on(holdings)
        if not self.driver.state.started:
            self.feed(p.Started())

    def _go_on(self, holdings: Holdings) -> None:
        """Take up what an earlier controller left: none of its cells is left, its executions are."""
        history, pending = self.history, GroupStatus.PENDING
        self.feed(p.AllCellsLost())
        groups = self.driver.state.groups
        resume.register_executions(self.executions, history, self.config.tasks, self.query)
        self.processing.unsealed = resume.not_at_rest(self.context.layout, history)
        self.processing.awaited = {group.id for group in groups.values() if group.status is not pending}
        self.processing.tell_again(groups, history.outcomes)
        for id in (id for group in groups.values() for id in group.executions if id in history.outcomes):
            self.outcomes.count_valid(history.outcomes[id])
        resume.go_on(self.executions, history, self.context.progress.note, holdings)
        history.forget_all_but(groups, self.processing.unsealed)
        self.decisions.forecast()
        self.steps.evaluate_if_awaited()

    async def _serve(self) -> None:
        while not self._ended() and not self.departure.due(self.leaving.idle):
            with contextlib.suppress(TimeoutError):
                self.reception.note(await asyncio.wait_for(self.peers.inbox.get(), TICK_S))
            for _ in range(self.peers.inbox.qsize()):  # what comes meanwhile waits: restarts must not
                self.reception.note(self.peers.inbox.get_nowait())
            if self.departure.ending is None and not self.departure.judging:
                await self.reception.restart_the_dead()
            if time.monotonic() - self._ticked_at >= TICK_S:
                self._tick()

    def _ended(self) -> bool:
        """The schedule has stopped; after the last step the outcomes still under way are waited for."""
        if self.decisions.stop_reason is None:
            return False
        return bool(self.decisions.stop_reason) or (self.reception.ready and not self.executions.unfinished())

    def _tick(self) -> None:
        self._ticked_at = time.monotonic()
        self.departure.tick()
        self.executions.launch_held()
        if self.executions.held and self.departure.ending is None and self.leaving.idle():
            self.departure.nothing_fits()
        self.peers.check_liveness()
        if self.external is not None:
            self.external.check()
        self.journal.sync_soon()
        self.cells.end_doubts(self._ticked_at)
        self.guests.tick()
        self.reception.restart_the_starved(self._ticked_at)
        self.reception.restart_the_overdue(self._ticked_at)
        publishing = self.weights.publishing is not None
        cells, state = self.cells.present, self.driver.state
        self.observer.sample(cells, self.batches, state, self.reception.running_calls, publishing)
        self.context.progress.tick(state, cells)
