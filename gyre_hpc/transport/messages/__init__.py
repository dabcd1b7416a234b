"""Every message that crosses a link, by direction. Small, ordered, typed; bulk goes through regions.

A link joins the controller to one peer: a cell leader, the gateway, the runner, the processor or a cell host. The envelope
(epoch, incarnation, sequence) belongs to `wire.py`; these are the bodies. This package is the one to import from. Pickle never crosses a wire.

An answer names its command: calls and work by execution and attempt, batch, micro-step or version, switches and routes by
a `Serial` of their own, so that a late answer is never taken for that of a later command.
"""

from __future__ import annotations

from gyre_hpc.transport.messages.adoption import Holding
from gyre_hpc.transport.messages.base import (
    AskedToEnd,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    PeerKind,
    Serial,
    Shutdown,
    Urgent,
)
from gyre_hpc.transport.messages.cell import (
    BatchCommitted,
    BecomeEngine,
    BecomeTrainer,
    CellSwitched,
    Claim,
    Claimed,
    CommitBatch,
    CommitFailed,
    Contribution,
    ContributionCommitted,
    EngineDown,
    FlushContribution,
    MicroStepDone,
    MicroStepUnavailable,
    PublishWeights,
    RestoreTrainer,
    StartBatch,
    StartPostponed,
    SwitchFailed,
    SwitchPostponed,
    TrainerRestored,
    WeightsPublished,
    WorkReady,
)
from gyre_hpc.transport.messages.channels import (
    AcceptChannel,
    ChannelGone,
    ChannelJoined,
    ChannelsOff,
    ChannelWanted,
    JoinChannel,
    PortPosted,
)
from gyre_hpc.transport.messages.gateway import (
    CloseExecution,
    EngineFault,
    ExecutionSealed,
    GatewayStatus,
    HeldBack,
    OpenExecution,
    Route,
    Unroute,
    Unrouted,
)
from gyre_hpc.transport.messages.host import (
    EndProcess,
    LeaveCells,
    OfferCells,
    ProcessEnded,
    ProcessSerial,
    StartProcess,
)
from gyre_hpc.transport.messages.processor import (
    DropGroup,
    ExecutionOutcome,
    ExpectGroup,
    GroupProcessed,
    MicroStepRef,
    Seal,
    ShardSealed,
)
from gyre_hpc.transport.messages.regions import Fragment, Manifest, RegionKind
from gyre_hpc.transport.messages.runner import (
    AssessExecution,
    CancelExecution,
    ExecutionAssessed,
    ExecutionClosed,
    ExecutionInterrupted,
    ExecutionStarted,
    ForgetExecution,
    StartExecution,
)
from gyre_hpc.transport.messages.steps import DONE, StepDone, StepName

__all__ = [
    "DONE",
    "AcceptChannel",
    "AskedToEnd",
    "AssessExecution",
    "BatchCommitted",
    "BecomeEngine",
    "BecomeTrainer",
    "CancelExecution",
    "CellSwitched",
    "ChannelGone",
    "ChannelJoined",
    "ChannelWanted",
    "ChannelsOff",
    "Claim",
    "Claimed",
    "CloseExecution",
    "CommitBatch",
    "CommitFailed",
    "Contribution",
    "ContributionCommitted",
    "DropGroup",
    "EndProcess",
    "EngineDown",
    "EngineFault",
    "ExecutionAssessed",
    "ExecutionClosed",
    "ExecutionInterrupted",
    "ExecutionOutcome",
    "ExecutionSealed",
    "ExecutionStarted",
    "ExpectGroup",
    "FlushContribution",
    "ForgetExecution",
    "Fragment",
    "FromController",
    "FromPeer",
    "GatewayStatus",
    "Goodbye",
    "GroupProcessed",
    "Heartbeat",
    "HeldBack",
    "Hello",
    "Holding",
    "JoinChannel",
    "LeaveCells",
    "Manifest",
    "Message",
    "MicroStepDone",
    "MicroStepRef",
    "MicroStepUnavailable",
    "OfferCells",
    "OpenExecution",
    "PeerKind",
    "PortPosted",
    "ProcessEnded",
    "ProcessSerial",
    "PublishWeights",
    "RegionKind",
    "RestoreTrainer",
    "Route",
    "Seal",
    "Serial",
    "ShardSealed",
    "Shutdown",
    "StartBatch",
    "StartExecution",
    "StartPostponed",
    "StartProcess",
    "StepDone",
    "StepName",
    "SwitchFailed",
    "SwitchPostponed",
    "TrainerRestored",
    "Unroute",
    "Unrouted",
    "Urgent",
    "WeightsPublished",
    "WorkReady",
]

FromPeer = (
    Hello
    | Heartbeat
    | Goodbye
    | Holding
    | AskedToEnd
    | Unrouted
    | EngineFault
    | ExecutionSealed
    | HeldBack
    | GatewayStatus
    | ExecutionStarted
    | ExecutionClosed
    | ExecutionInterrupted
    | ExecutionAssessed
    | GroupProcessed
    | ShardSealed
    | StepDone
    | CellSwitched
    | SwitchFailed
    | SwitchPostponed
    | StartPostponed
    | EngineDown
    | Claim
    | MicroStepDone
    | MicroStepUnavailable
    | Contribution
    | BatchCommitted
    | CommitFailed
    | WeightsPublished
    | TrainerRestored
    | OfferCells
    | LeaveCells
    | ProcessEnded
    | ChannelWanted
    | PortPosted
    | ChannelJoined
    | ChannelGone
    | ChannelsOff
)
FromController = (
    Shutdown
    | OpenExecution
    | CloseExecution
    | Route
    | Unroute
    | StartExecution
    | CancelExecution
    | AssessExecution
    | ForgetExecution
    | HeldBack
    | ExpectGroup
    | ExecutionOutcome
    | DropGroup
    | Seal
    | BecomeTrainer
    | BecomeEngine
    | StartBatch
    | Claimed
    | WorkReady
    | FlushContribution
    | ContributionCommitted
    | CommitBatch
    | PublishWeights
    | RestoreTrainer
    | StartProcess
    | EndProcess
    | LeaveCells
    | AcceptChannel
    | JoinChannel
    | ChannelGone
)
