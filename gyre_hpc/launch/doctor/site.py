"""What a site can do: findings of `gyre doctor`, and `site.json`, which slurm/accept.sbatch writes for `gyre doctor` to show.

A finding is one fact with a verdict. `fault`: runs cannot work as they are; `warning`: they work, but less well, or not
in every layout. Whatever is not ok says what to do. `site.json` is replaced whole (tmp, fsync, rename).
"""

from __future__ import annotations

import enum
import socket
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.files import replace_file

FILE_NAME: Final = "site.json"
SITE_VERSION: Final = 1
EVERY: Final = "every node"


class State(enum.Enum):
    """Verdict of a finding, mildest first."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """`name` of the check, its verdict, what was found and what to do; `node`: where, in a job (names, EVERY)."""

    name: str
    state: State
    found: str
    fix: str = ""
    node: str = ""


class Site(msgspec.Struct, frozen=True):
    """What was found, when (UTC, ISO 8601), from which host, by which gyre_hpc; `transport` is the one to use."""

    findings: list[Finding]
    host: str
    time: str
    gyre: str
    transport: str = "sockets"
    version: int = SITE_VERSION


def ok(name: str, found: str) -> Finding:
    """A finding that asks for nothing."""
    return Finding(name, State.OK, found)


def warning(name: str, found: str, fix: str) -> Finding:
    """A finding that runs can live with."""
    return Finding(name, State.WARNING, found, fix)


def fault(name: str, found: str, fix: str) -> Finding:
    """A finding that must be mended first."""
    return Finding(name, State.FAULT, found, fix)


def site_of(findings: Iterable[Finding], transport: str = "sockets") -> Site:
    """These findings as made here and now, and the transport they speak for."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Site(list(findings), socket.gethostname(), moment, version("gyre_hpc"), transport)


def write_site(site: Site, folder: Path) -> Path:
    """Write `site.json` into `folder`."""
    path = folder / FILE_NAME
    replace_file(path, msgspec.json.format(msgspec.json.encode(site), indent=2) + b"\n")
    return path


def read_site(folder: Path) -> Site | None:
    """What the last acceptance job found; None where none has run. Raises CorruptRecord naming the file."""
    path = folder / FILE_NAME
    try:
        site = msgspec.json.decode(path.read_bytes(), type=Site)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecord(
            f"{path}: {error}", fix="sbatch -N2 slurm/accept.sbatch writes it again"
        ) from error
    if site.version != SITE_VERSION:
        raise CorruptRecord(
            f"{path}: version {site.version}, this gyre_hpc reads {SITE_VERSION}",
            fix="sbatch -N2 slurm/accept.sbatch writes it again",
        )
    return site
