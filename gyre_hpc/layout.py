"""Names inside a run folder (design section 10). The only place that knows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.records import ExecutionId, Version


@dataclass(frozen=True)
class RunLayout:
    """Paths of one run; `root` is the run folder. Creating folders is `create`'s job, nobody else's."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def secret(self) -> Path:
        """HMAC key of the run's links, mode 0600."""
        return self.root / "secret"

    @property
    def rendezvous(self) -> Path:
        """JSON {host, port, epoch, pid}: where the controller listens."""
        return self.root / "controller.json"

    @property
    def transport(self) -> Path:
        """The transport that `transport.kind=auto` was resolved to, one word."""
        return self.root / "transport"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def calls(self) -> Path:
        """Call logs, one file per gateway process."""
        return self.root / "calls"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def manifest(self) -> Path:
        """One JSON line per sealed shard."""
        return self.root / "manifest.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def model(self) -> Path:
        """The starting policy in Hugging Face layout (copied at start-up, so that a run is self-contained)."""
        return self.root / "model"

    def named(self, path: Path) -> str:
        """`path` as records and messages name it: relative to the run folder, which others may see at another place."""
        return path.relative_to(self.root).as_posix()

    def checkpoint(self, version: Version) -> Path:
        return self.checkpoints / f"v{version:06d}"

    @property
    def services(self) -> Path:
        """Which processes are, or were, the run's gateway and runner."""
        return self.root / "services"

    @property
    def service_job(self) -> Path:
        """Id of the Slurm job that gateway and runner were submitted as (`cluster.runners=external`)."""
        return self.services / "job"

    def service(self, kind: str) -> Path:
        """JSON record of the last process of this kind."""
        return self.services / f"{kind}.json"

    @property
    def jobs(self) -> Path:
        """Scripts and logs of the Slurm jobs this run was submitted as, by job id."""
        return self.root / "jobs"

    @property
    def broadcast(self) -> Path:
        """What was packed for the nodes' own disks, and what they said of it (`launch.broadcast`)."""
        return self.root / "broadcast"

    @property
    def bad_nodes(self) -> Path:
        """JSON list of nodes the run's next job should not be given (launch/nodes/bad_nodes.py)."""
        return self.root / "bad_nodes.json"

    @property
    def job_record(self) -> Path:
        """What one job of the run must know of those before it (`launch.margin`)."""
        return self.root / "jobs.json"

    @property
    def package(self) -> Path:
        """Folder that holds the frozen copy of gyre_hpc: what `gyre submit` runs."""
        return self.root / "package"

    def logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt-{attempt}"

    def execution(self, execution: ExecutionId, attempt: int) -> Path:
        """Workspace, harness log and evaluator output of one attempt."""
        return self.root / "executions" / f"{execution:06d}" / f"attempt-{attempt}"

    def create(self) -> None:
        """Make the folders."""
        for folder in (self.journal, self.calls, self.shards, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
