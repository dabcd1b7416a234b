"""`transport.kind=auto`, resolved once per run: what the site's acceptance job found best, into the file RUN/transport.

Every process of the run reads that file with its configuration (`load_run_config`), so all of them, also those of a
resumed run and guests, mean the same way. Remove the file before a resume to have it chosen again.
"""

from __future__ import annotations

from gyre_hpc.config import RunConfig
from gyre_hpc.errors import ConfigError, CorruptRecord
from gyre_hpc.files import replace_file
from gyre_hpc.launch.doctor.site import FILE_NAME, read_site
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport import nixl_agent

ACCEPT = "sbatch -N2 slurm/accept.sbatch"


def check_transport(config: RunConfig) -> None:
    """Raise ConfigError for a transport that was asked for by name and that this node does not have."""
    if config.transport.kind == "nixl" and not nixl_agent.installed():
        raise ConfigError("transport.kind=nixl: NIXL is not installed", fix=nixl_agent.INSTALL)


def choose_transport(config: RunConfig, layout: RunLayout) -> str:
    """Resolve `auto` in `config` and for all processes to come; returns the line that says what holds and why."""
    asked = config.transport.kind
    if asked != "auto":
        return (
            f"transport: {asked}" if not layout.transport.exists() else f"transport: {asked} (chosen by auto)"
        )
    kind, why = _best(config, layout)
    config.transport.kind = kind
    replace_file(layout.transport, f"{kind}\n".encode())
    return f"transport: {kind} (auto: {why})"


def _best(config: RunConfig, layout: RunLayout) -> tuple[str, str]:
    root = layout.root.parent
    try:
        site = read_site(root)
    except CorruptRecord as error:
        return "sockets", f"{error.message}; {ACCEPT} {root} writes it again"
    if site is None:
        return "sockets", f"no {FILE_NAME} in {root}; {ACCEPT} {root} finds what else passes"
    if site.transport == "nixl" and not nixl_agent.installed():
        return "sockets", f"{root / FILE_NAME} says nixl, which is not installed here: {nixl_agent.INSTALL}"
    return site.transport, f"{root / FILE_NAME} of {site.time}"
