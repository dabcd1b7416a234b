"""Typed schema of `conf/`. Importable without torch, MPI or h5py; every field is documented by the string under it.

Hydra composes the groups, OmegaConf checks types against these dataclasses, `validate` checks what types cannot.
A process of a run reads the resolved `RUN/config.yaml` with `load_run_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml  # type: ignore[import-untyped,unused-ignore]
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gyre_hpc.config_checks import validate
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.config_keys import omegaconf_error
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.layout import RunLayout


@dataclass
class ModelConfig:
    """The policy: architecture, starting weights, tokenizer and renderer."""

    path: str = MISSING
    """Folder in Hugging Face layout: config.json, model*.safetensors, tokenizer.json. `package:NAME` = shipped with gyre_hpc;
    `hf:ORG/NAME[@REVISION]` = of the Hugging Face hub, fetched by `gyre stage` and read from there."""
    staged: str = ""
    """Folder that holds what `gyre stage` fetched from the hub; empty = ROOT/.staged."""
    renderer: str = "qwen3"
    """Name of the `renderers` renderer that turns messages into ids and ids into messages."""
    thinking: bool = False
    """Whether the renderer leaves the thinking block to the model."""
    max_context: int = 2048
    """Longest prompt + output in tokens; a longer request is refused in the dialect's own words."""


@dataclass
class EngineConfig:
    """Rollout engine of a cell."""

    kind: str = "torch"
    """`torch`: the embedded reference engine (CPU, small dense models); `sglang`: a real SGLang server."""
    page_tokens: int = 16
    """Tokens of one KV page; only full pages are shared between calls."""
    pool_tokens: int = 65536
    """Tokens in the KV pool of one cell."""
    capacity: int = 11
    """Executions one cell serves at the same time (C_e)."""
    threads: int = 1
    """Torch threads of the engine process."""
    kv_policy: str = "strict"
    """`strict`: KV of other weights is never used; a publication cuts running calls and they go on under the new version's
    pages. `keep_execution`: an execution keeps its pages over publications, and its running calls go on uncut."""
    kv_store_mib: int = 256
    """Host memory of a cell for KV pages that move to another one, in MiB; 0 = a moved call is prefilled again."""
    start_timeout_s: float = 300.0
    """Seconds an engine may take from start to healthy."""
    tokens_per_s: float = 0.0
    """Paced device: tokens per second with all `capacity` calls running (each call gets its share, never more); 0 = unpaced.
    Only for comparing policies on shared CPUs."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    """What only SGLang needs."""


@dataclass
class TrainerConfig:
    """Megatron-core training inside a cell."""

    tensor_parallel: int = 1
    """TP size inside a cell."""
    tokens_per_micro_step: int = 4096
    """Packed tokens of one micro-step; at least the longest admissible path (model.max_context)."""
    min_micro_steps_per_group: int = 4
    """A group is split into at least this many micro-steps where it has that many paths."""
    packing: str = "tree"
    """`tree`: prefix forest with tree attention. `rows`: one row per path (recurrent architectures)."""
    learning_rate: float = 3e-4
    """Adam step size after warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    beta1: float = 0.9
    """Adam beta1."""
    beta2: float = 0.99
    """Adam beta2."""
    eps: float = 1e-8
    """Adam epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Global gradient norm clip; 0 = off."""
    threads: int = 1
    """Torch threads of a trainer rank on CPU."""
    checkpoint_every: int = 1
    """Publications between two checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    tokens_per_s: float = 0.0
    """Paced device: tokens per second a trainer may consume, 0 = unpaced."""


@dataclass
class ObjectiveConfig:
    """Advantage, selection and loss (design section 8)."""

    kind: str = "sequence_clip"
    """`sequence_clip` (GSPO as adapted by the paper) or `grpo` (token clip)."""
    std: bool = True
    """Divide the centred reward by (std + eps)."""
    eps: float = 0.1
    """Added to the group's standard deviation."""
    j_max: int = 5
    """Most paths kept per execution."""
    clip_low: float = 0.005
    """Lower half width of the ratio clip."""
    clip_high: float = 0.005
    """Upper half width of the ratio clip."""
    ratio_cap: float = 5.0
    """Cap of the token-level importance weight."""
    replay_weight: float = 0.0
    """Weight of the replayed warm-start loss (mean over replayed tokens) added to each step; 0 = off."""
    replay_tokens: int = 0
    """Replayed demonstration tokens per optimizer step."""


@dataclass
class ScheduleConfig:
    """When cells switch roles (design section 5)."""

    policy: str = "gyre"
    """`gyre` (elastic), `colocate` (whole pool switches) or `async` (fixed pools)."""
    batch_groups: int = 4
    """B: groups consumed by one training step."""
    executions_per_group: int = 8
    """N: executions of one query."""
    steps_per_burst: int = 1
    """mu: training steps between two publications."""
    extra_dispatch: float = 0.0
    """phi: groups dispatched ahead, in units of B; phi*B must be an integer."""
    oversample: int = 0
    """m: extra executions per group; the first N valid outcomes count, the surplus is withdrawn."""
    max_staleness: int = -1
    """Most steps a group may be behind when consumed; -1 = ceil(2(phi+mu))."""
    max_void_bursts: int = 3
    """Bursts in a row without a step after which the run checkpoints and stops."""
    training_cells: int = 0
    """Cells fixed to training under `async`; 0 = half of them, at least one."""
    streaming: bool = True
    """Whether training may start before all groups of the burst are ready (baselines only)."""
    launch_order: str = "fifo"
    """`fifo`, or `longest_first`: queued executions of the queries that took longest so far are launched first."""
    overlap_joins: bool = True
    """Whether several cells may switch to training at once; false: one after the other (gyre only)."""
    steps: int = 30
    """Optimizer steps of the run."""


@dataclass
class TransportConfig:
    """Links and regions."""

    kind: str = "sockets"
    """How regions travel between hosts, beside TCP, which always can: `sockets` (TCP alone), `mpi`, `nixl` (RDMA), or `auto`:
    the best that the site's acceptance job (slurm/accept.sbatch) saw pass between two nodes."""
    same_host: bool = True
    """Map a region that lies on the puller's own host; false sends it over the network too, to try a network on one node."""
    heartbeat_s: float = 1.0
    """Seconds between two heartbeats."""
    pull_timeout_s: float = 120.0
    """Deadline of one region pull."""
    join_s: float = 10.0
    """Seconds in which one MPI join must be done; an endpoint that does not return from it is restarted (mpi)."""
    silent_s: float = 20.0
    """Seconds without a frame or an acknowledgement until an MPI channel is given up for the socket; more than `join_s` (mpi)."""
    stall_s: float = 10.0
    """Seconds in which a region on its way must move, or the endpoint is restarted and TCP takes over (mpi)."""


@dataclass
class GatewayConfig:
    """The black-box boundary."""

    keepalive_s: float = 15.0
    """Seconds of silence after which a waiting client gets a keep-alive event."""
    call_deadline_s: float = 3600.0
    """Seconds a call may take before its connection is reset and the execution marked infrastructure."""
    drain_s: float = 2.0
    """Seconds running calls get to finish when their cell leaves, before they are cut and moved."""
    kv_move_s: float = 10.0
    """Seconds the KV pages of a call may take from its cell to the next before it goes on without them; 0 = they never move."""
    max_calls: int = 0
    """Model calls allowed per execution; 0 = unlimited. Beyond it calls are refused."""
    max_sampled_tokens: int = 0
    """Sampled tokens allowed per execution, over all its calls together; 0 = unlimited. Calls end there by length, further
    ones are refused, and the record says that the budget was used up."""
    max_output_tokens: int = 1024
    """Cap of one answer."""
    max_body_mib: int = 64
    """Largest request body, decompressed: a history of a million tokens takes 4 to 8 MiB. A bigger one is refused (413)."""
    client_timeout_s: float = 60.0
    """Seconds a client gets to send the head of a request, its body, and to take what is written to it; then it is cut off."""
    max_stall_credit_s: float = 600.0
    """Most seconds of our own holding that are given back to the harness clock."""
    fsync_s: float = 1.0
    """Longest time between group fsyncs of the call log."""
    attach_grace_s: float = 60.0
    """Seconds a call goes on after its client left, for a repeat of the request to attach to."""
    engine_silence_s: float = 180.0
    """Seconds without a token after which an engine counts as failed and its calls are moved."""
    stall_alarm_s: float = 100.0
    """Seconds without a token after which a call's engine is warned of and the stall counted, before it counts as failed."""


@dataclass
class RoleRule:
    """Who sends a request: `role`, if all that is given here holds for it."""

    role: str = "unknown"
    """main, main-summary, sub-agent, sub-agent-summary or unknown."""
    header: str = ""
    """Name of an HTTP header that is there."""
    header_has: list[str] = field(default_factory=list)
    """Texts that the value of this header contains, all of them."""
    same: str = ""
    """Name of a header that had the same value in an earlier call of the execution, whose role was `after`."""
    after: str = ""
    """See `same`."""
    system: str = ""
    """Text that the system turn at the head contains."""
    last: str = ""
    """Text that the last turn contains, upper and lower case alike; a system turn behind it is passed over."""
    tool: str = ""
    """Name of a tool that is offered; `any` or `none` of them."""


@dataclass
class HarnessConfig:
    """The agent program, launched unmodified."""

    command: list[str] = field(default_factory=list)
    """Command line; {base_url}, {workspace}, {instruction}, {seed} are filled in. Empty = the shipped reference program."""
    env: dict[str, str] = field(default_factory=dict)
    """Extra environment; the same placeholders apply."""
    packages: list[str] = field(default_factory=list)
    """Packages the program comes from: npm:NAME@VERSION or pypi:NAME==VERSION; `gyre harness check` installs them.
    Empty = the program is on the node."""
    lock: str = ""
    """File in conf/harness/ that pins what PyPI packages depend on (pip's --constraint). Empty = pip chooses."""
    prefix: str = ""
    """Folder that holds installed packages, one folder per harness; every node must see it. Empty = ~/.local/share/gyre/harnesses."""
    files: dict[str, str] = field(default_factory=dict)
    """Files written into the private HOME before the start, text by relative path; the same placeholders apply."""
    roles: list[RoleRule] = field(default_factory=list)
    """Who sends a request: the first rule that holds; none: unknown. A program may say it itself, in a header `x-agent-role`."""
    session: str = ""
    """Header in which the program names a run of its own. One name under two base URLs means that two executions share a HOME
    or a session: such calls are counted as `shared_session` among the forks. Empty = it names none."""
    done_command: str = ""
    """Shell command by which its agent says that it is done, for the scripted agent of `gyre harness check`; empty = an answer
    without a tool call."""
    dialect: str = "openai-chat"
    """What it speaks: `openai-chat`, `openai-responses` or `anthropic-messages`."""
    deliver: str = "answer"
    """When a streamed answer leaves: `answer` when the generation is complete, which nothing that happens to an engine or the
    gateway can break; `blocks` sends thinking, text and each tool call as it is complete, for programs that need progress."""
    timeout_s: float = 150.0
    """Harness time limit: the execution is ended and its workspace scored."""
    overall_timeout_s: float = 300.0
    """Overall limit including set-up and evaluation: beyond it the execution is excluded."""
    max_turns: int = 16
    """Turn limit handed to the reference harness's main agent."""


@dataclass
class TasksConfig:
    """Where queries come from."""

    family: str = "patchkit"
    """Task family."""
    train_seed: int = 1_000_000
    """First training task; task i of the run is train_seed + i."""
    heldout_seed: int = 500_000
    """First held-out task; never trained on."""
    heldout: int = 40
    """Number of held-out tasks."""
    evaluation_repeats: int = 2
    """Executions per held-out task and evaluation point."""
    evaluate_every: int = 0
    """Publications between two evaluations; 0 = only before the first and after the last step."""
    max_modules: int = 6
    """patchkit: most modules of a task."""
    evaluator_timeout_s: float = 30.0
    """Seconds one evaluator attempt may take."""
    evaluators: int = 2
    """Evaluators that run at the same time in the runner; more workspaces wait."""
    evaluator_retries: int = 3
    """Evaluator attempts before the execution is excluded."""
    sandbox: str = "auto"
    """`auto` (userns where possible), `userns`, or `none`."""
    readonly: list[str] = field(default_factory=list)
    """Host folders visible read-only inside the sandbox beside the OS (toolchains, harness installations)."""
    keep_workspaces: bool = True
    """Keep each workspace after its assessment; false keeps only the log and the assessment."""


@dataclass
class RunConfig:
    """One run. `gyre train experiment=quickstart` composes it; RUN/config.yaml holds it resolved."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    name: str = "run"
    """Name of the run; its folder is `root`/`name`-TIMESTAMP."""
    root: str = "runs"
    """Folder that holds runs, on the parallel filesystem."""
    seed: int = 0
    """Seed of everything drawn in the run."""
    resume: str = ""
    """Run folder to continue; the configuration is the frozen one of that run."""
    resume_force: bool = False
    """Take over a run owned by another host (only if you know that owner is gone)."""
    trust_tasks: bool = False
    """Run harness and tests without a sandbox where the machine has no user namespaces."""


def structured() -> DictConfig:
    """The schema as an OmegaConf structured config."""
    schema = OmegaConf.structured(RunConfig)
    assert isinstance(schema, DictConfig)
    return schema


def to_run_config(config: DictConfig) -> RunConfig:
    """Merge into the schema and validate. Raises ConfigError naming the key and the nearest valid one."""
    try:
        merged = OmegaConf.merge(structured(), config)
        run = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise omegaconf_error(RunConfig, error) from error
    assert isinstance(run, RunConfig)
    validate(run)
    return run


def load_run_config(run_dir: Path) -> RunConfig:
    """The resolved configuration frozen in a run folder; `transport.kind=auto` as the controller has resolved it."""
    path, chosen = run_dir / "config.yaml", RunLayout(run_dir).transport
    if not path.is_file():
        raise MissingInput(f"{path}: no such file", fix="name a folder made by gyre train")
    try:
        loaded = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}", fix="restore that file: it was frozen at the start") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: not a mapping", fix="restore that file: it was frozen at the start")
    try:
        run = to_run_config(loaded)
        if run.transport.kind == "auto" and chosen.is_file():
            run.transport.kind = chosen.read_text().strip()
            validate(run)
        return run
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", fix=error.fix) from error


def save_run_config(run: RunConfig, run_dir: Path) -> None:
    """Freeze the resolved configuration."""
    OmegaConf.save(OmegaConf.structured(run), run_dir / "config.yaml")
