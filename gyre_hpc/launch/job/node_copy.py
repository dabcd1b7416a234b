"""Steps that run from a copy on their node's own disk (`cluster.broadcast`): which, and how their command changes.

A virtual environment is not meant to be moved, but what it needs to work elsewhere is little: Python takes the folder above
its own `bin` that holds `pyvenv.cfg` for its prefix and finds the base installation by the `home` in it (PEP 405). So a copy
of the whole folder works if it is `COPY/bin/python` that is started, as every process of a run is; nothing is activated and no
console script (which names the old place) is used. A conda environment finds its prefix by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.launch.plan import ProcessSpec


@dataclass(frozen=True)
class NodeCopy:
    """Copies under the same path on each of `nodes`. `shared`: the run's own `package/`, which `package` replaces.

    `python`: the interpreter inside the copied environment, None where only the package was sent.
    """

    nodes: frozenset[str]
    package: Path
    shared: Path
    python: Path | None = None

    def applied(self, spec: ProcessSpec, nodes: Sequence[str], cluster: ClusterConfig) -> ProcessSpec:
        """The process run from the copy, if all its nodes have it. A cell in a container keeps what the container has."""
        contained = bool(cluster.container) and not spec.service
        if contained or not self.nodes.issuperset(nodes) or sys.executable not in spec.argv:
            return spec
        argv = [str(self.python) if self.python and word == sys.executable else word for word in spec.argv]
        return replace(spec, argv=argv, env={**spec.env, "PYTHONPATH": self._path(spec.env)})

    def _path(self, env: Mapping[str, str]) -> str:
        """The copy first; its original is left out: each import would look there."""
        shared = os.path.realpath(self.shared)
        before = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        kept = [word for word in before.split(os.pathsep) if word and os.path.realpath(word) != shared]
        return os.pathsep.join([str(self.package), *kept])


def read_outcomes(said: str) -> dict[str, str]:
    """What nodes said of unpacking (`launch.unpack`), by node: "" for one that has it, else why not."""
    told = (line.split(" ", 2)[1:] for line in said.splitlines() if line.startswith("unpacked "))
    outcomes: dict[str, str] = {}
    for node, outcome in (words for words in told if len(words) == 2):
        outcomes[node] = outcomes.get(node) or ("" if outcome == "ok" else outcome)
    return outcomes
