"""The `cluster` section: where the processes of a run run, and how long each is waited for.

Its parts that matter to one reader each lie beside it: `config_job.py` (what submission asks Slurm for) and
`config_service.py` (how large the processes beside the cells are).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre_hpc.config_job import JobConfig
from gyre_hpc.config_service import ServiceConfig


@dataclass
class CellConfig:
    """Shape of one cell."""

    ranks: int = 1
    """Trainer ranks (CPU: processes; GPU: one per device)."""
    nodes: int = 1
    """Nodes of a cell (slurm)."""
    cpus_per_rank: int = 1
    """CPUs bound to a rank (slurm)."""
    mem: str = "2G"
    """Memory of the cell's step (slurm)."""
    gres: str = ""
    """Generic resources of the cell's step, for example gpu:8 (slurm)."""


@dataclass
class ClusterConfig:
    """Where the processes run."""

    kind: str = "local"
    """`local` (child process groups) or `slurm` (one srun step per cell inside the allocation)."""
    cells: int = 3
    """K: number of cells; index 0 is the core."""
    standalone: int = 0
    """Of the `cells`, how many serve calls for the whole run and never train: the last ones, the standalone pool."""
    cell: CellConfig = field(default_factory=CellConfig)
    """Shape of every cell."""
    service: ServiceConfig = field(default_factory=ServiceConfig)
    """Sizes of the processes beside the cells."""
    host: str = "127.0.0.1"
    """Address servers of this run bind to and publish; `auto`: each node's own, on the route to the controller (several nodes)."""
    interface: str = ""
    """Network interface whose address `host=auto` takes on each node, for example ib0; empty = that of the route."""
    scratch: str = ""
    """Node-local folder for temporary files and JIT caches; each job has a folder of its own below it, removed at its end.
    Empty = $SLURM_TMPDIR, else $TMPDIR, else /tmp."""
    broadcast: str = "none"
    """What the batch node packs and sends to the node-local folder of each node before the first step, for the steps to run from:
    `none`, `package` (gyre_hpc) or `environment` (the Python environment as well) (slurm)."""
    srun_args: list[str] = field(default_factory=list)
    """Extra arguments of every srun (slurm)."""
    container: list[str] = field(default_factory=list)
    """What stands before the command of each cell (slurm): [apptainer,exec,--nv,IMAGE], or for pyxis ['--container-image=IMAGE']."""
    container_python: str = ""
    """Python inside the container that has gyre_hpc; empty = the controller's own path, seen through a mount."""
    mpi_plugin: str = "pmi2"
    """srun's --mpi for MPI endpoints: what starts the site's MPICH, Cray MPICH or Intel MPI (slurm, transport=mpi)."""
    mpi_env: dict[str, str] = field(default_factory=dict)
    """Environment of MPI endpoints: netmod, network devices, MPI4PY_LIBMPI=FILE (slurm, transport=mpi)."""
    layout: str = "flat"
    """`flat`: one set of nodes for all. `het`: a heterogeneous job, component 0 for controller, gateway, runner and processor,
    component 1 for the cells (slurm)."""
    survive_node_loss: bool = True
    """Refuse a job that Slurm would end whole when one of its nodes is lost; false: only warn (slurm)."""
    job: JobConfig = field(default_factory=JobConfig)
    """The job that `gyre submit` asks for."""
    suspect_after_s: float = 10.0
    """Seconds without a heartbeat until a peer is SUSPECT."""
    lost_after_s: float = 20.0
    """Seconds of SUSPECT until it is LOST."""
    orphan_grace_s: float = 120.0
    """Seconds gateway and runner outlive their controller; one resumed in that time takes them over with all they run."""
    runners: str = "job"
    """`job`: gateway and runner belong to the run's job. `external`: to a longer job of their own, which holds calls while the
    other is requeued; `gyre submit` submits both, elsewhere `gyre services RUN` starts them."""
    restarts: int = 8
    """Most replacements of lost cells, runner, gateway or processor within `restart_window_s`; one more ends the run."""
    restart_window_s: float = 3600.0
    """Seconds after which a replacement no longer counts against `restarts`."""
    start_timeout_s: float = 300.0
    """Seconds a process may take from launch to its first hello."""
    bad_node_deaths: int = 3
    """Deaths of cells on one node within `bad_node_window_s` after which the node is bad: avoided, and excluded from the
    run's next job (slurm)."""
    bad_node_window_s: float = 3600.0
    """Seconds after which a death no longer counts against its node (slurm)."""
    bad_node_expire_s: float = 86400.0
    """Seconds after which a bad node may be given again (slurm)."""
    health_probe: list[str] = field(default_factory=list)
    """Command run on a cell's node before the cell starts, as the site's node health check; if it fails, or takes more than
    60 s, the node is bad (slurm)."""
