"""The `cluster.job` section: the Slurm job that `gyre submit` asks for. Read at submission only.

Sizes of the cells are `cluster.cells` and `cluster.cell`; what lies here is the rest of the request. Empty text means
that the site's default holds. `gyre_hpc.launch.job.request` turns both into nodes, CPUs, memory and gres.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class JobConfig:
    """The Slurm job of a run (`gyre submit`); a site profile (slurm/sites/) sets these keys once."""

    partition: str = ""
    """Partition (queue); under `cluster.layout=het` that of the cells."""
    service_partition: str = ""
    """Partition of the controller's component (het); empty = `partition`."""
    account: str = ""
    """Account that is charged."""
    qos: str = ""
    """Quality of service."""
    reservation: str = ""
    """Reservation to run in."""
    constraint: str = ""
    """Node features the cells' nodes must have, for example a100&ib."""
    exclude: str = ""
    """Nodes never to be given, in Slurm's notation: 'n[3,7-9]', with the quotes."""
    switches: str = ""
    """Most leaf switches of the cells' nodes, with the longest wait for it: 1@02:00:00."""
    time: str = "04:00:00"
    """Time limit: hours:minutes:seconds or days-hours, quoted in YAML."""
    margin_s: int = 180
    """Seconds before the time limit at which the run begins to leave: no more launches, a checkpoint, the job handed back.
    At least 1.5 times the longest checkpoint. Slurm may tell a minute early; 0 = it is not told, and the limit ends the job."""
    exclusive: bool = False
    """Whether the nodes are shared with no other job."""
    requeue: bool = True
    """Whether the run goes on by itself in the same job or a successor, after the time limit, preemption or scontrol requeue.
    False: it ends with a checkpoint and prints how to go on."""
    requeue_by: str = "auto"
    """How a job is handed back: `exit` (with a code of the site's RequeueExit), `scontrol` (scontrol requeue), `successor` (another
    job that waits for the end of this one), or `auto`: the first of them that the site allows for this job."""
    fruitless_jobs: int = 2
    """Jobs in a row that took no step and recorded no outcome, after which a run is not handed back but ends with an error."""
    walltime_policy: str = "clip"
    """What becomes of an execution whose expected time (90th percentile so far) does not fit before the end of the job: `clip` starts
    it with a shorter time limit (ended by it, it is scored like one that timed out), `hold` leaves it to the next job."""
    cells_per_node: int = 1
    """Cells on one node, for cells of one node."""
    service_cpus: int = 0
    """CPUs per node for controller, gateway, runner and processor: beside the cells (flat), or of their component (het). 0 = as
    many as their sizes (`cluster.service`) come to, spread over the nodes; with fewer they share."""
    service_mem: str = ""
    """Memory per node for the same; empty = what their sizes come to, and less is refused."""
    service_time: str = "1-00:00:00"
    """Time limit of the job of gateway and runner under `cluster.runners=external`: it must outlast that of the run's job, its
    waits in the queue included."""
    service_lost: str = "resubmit"
    """What a run does when that job has ended before it (external): `resubmit`, or `end` with an error."""
    service_nodes: int = 2
    """Nodes of the controller's component (het); below 2 the loss of any node ends the job."""
    sbatch: list[str] = field(default_factory=list)
    """Further arguments of sbatch for every component, as in ['--mail-type=END','--comment=trial']."""
    setup: list[str] = field(default_factory=list)
    """Shell lines run first on the batch node; one that fails ends the job."""
    modules: list[str] = field(default_factory=list)
    """Environment modules loaded then on the batch node; the steps inherit the environment."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the controller and of all its steps."""
