"""A process manager for one-rank MPICH processes of this host, where there is no Slurm: benchmarks and tests.

MPICH's processes join each other only if a process manager gave each world a name of its own; MPICH's own one listens on all
interfaces. This one speaks PMI-1 over an inherited socket pair (wire protocol: MPICH, src/pmi/simple; a line per
command, `key=value` words) and knows nothing but one rank with its own key-value space.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

MAXES = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=4096"


def spawn(argv: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a world of one; it is served until it ends. `options` are Popen's."""
    ours, theirs = socket.socketpair()
    told = {"PMI_FD": str(theirs.fileno()), "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_SPAWNED": "0"}
    with theirs:
        process = subprocess.Popen(
            list(argv), env={**os.environ, **env, **told}, pass_fds=[theirs.fileno()], **options
        )
    threading.Thread(target=_serve, args=(ours,), name="gyre-pmi", daemon=True).start()
    return process


def _serve(connection: socket.socket) -> None:
    name, space = f"gyre-{uuid.uuid4().hex[:12]}", dict[str, str]()
    with connection, contextlib.suppress(OSError), connection.makefile("rw", newline="\n") as lines:
        for line in lines:
            words = dict(word.partition("=")[::2] for word in line.split())
            answer = _answer(words, name, space)
            if answer:
                lines.write(answer + "\n")
                lines.flush()


def _answer(words: Mapping[str, str], name: str, space: dict[str, str]) -> str:
    match words.get("cmd"):
        case "init":
            return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
        case "get_maxes":
            return f"{MAXES} rc=0"
        case "get_appnum":
            return "cmd=appnum appnum=0 rc=0"
        case "get_my_kvsname":
            return f"cmd=my_kvsname kvsname={name} rc=0"
        case "get_universe_size":
            return "cmd=universe_size size=1 rc=0"
        case "put":
            space[words["key"]] = words["value"]
            return "cmd=put_result rc=0 msg=success"
        case "get":
            value = space.get(words["key"])
            return (
                "cmd=get_result rc=-1 msg=key_not_found value=unknown"
                if value is None
                else (f"cmd=get_result rc=0 msg=success value={value}")
            )
        case "barrier_in":
            return "cmd=barrier_out rc=0"
        case "finalize":
            return "cmd=finalize_ack rc=0"
        case _:
            return ""
