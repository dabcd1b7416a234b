"""How a peer finds and proves itself to its run: the secret file and the rendezvous file.

The secret (32 random bytes, hex, mode 0600) is made once per run folder and kept by later attempts, so that peers that
outlive a controller can talk to its successor; the engines' bearer token and the names of the run's regions and KV pages
are derived from it. Behind it stands the folder it was made for: a copy of a run folder gets a secret of its own, one that
was moved keeps it. The rendezvous file is
replaced whole (tmp, fsync, rename): a reader sees one controller's address or another's, never a mixture. Called by
the controller (write) and every peer (read).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

import msgspec

from gyre_hpc.errors import CorruptRecord, MissingInput
from gyre_hpc.files import replace_file
from gyre_hpc.layout import RunLayout

SECRET_BYTES = 32
_ENGINE_PURPOSE = b"engine"


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the controller of `epoch` listens."""

    host: str
    port: int
    epoch: int
    pid: int


def write_secret(layout: RunLayout) -> bytes:
    """The run's secret, made if the run has none or only that of the run it was copied from.

    The file is never readable by others, not even for a moment. Raises OSError, CorruptRecord.
    """
    if _copied(layout):
        layout.secret.unlink()
    try:
        handle = os.open(layout.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_secret(layout)
    secret = secrets.token_bytes(SECRET_BYTES)
    with os.fdopen(handle, "w") as file:
        file.write(f"{secret.hex()}\n{layout.root.resolve()}\n")
        file.flush()
        os.fsync(file.fileno())
    return secret


def _copied(layout: RunLayout) -> bool:
    """Whether the folder that the secret was made for is still there, and is another one."""
    try:
        lines = layout.secret.read_text().splitlines()
        home = RunLayout(Path(lines[1])) if len(lines) > 1 else layout
        other = home.secret.read_text().splitlines()[:1] == lines[:1]
        return other and not home.root.samefile(layout.root)
    except OSError:
        return False


def read_secret(layout: RunLayout) -> bytes:
    """The run's secret. Raises MissingInput or CorruptRecord naming the file."""
    try:
        text = layout.secret.read_text().partition("\n")[0].strip()
    except FileNotFoundError as error:
        raise MissingInput(
            f"{layout.secret}: no such file", fix="start the controller of this run first"
        ) from error
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise CorruptRecord(
            f"{layout.secret}: not a secret of {SECRET_BYTES} bytes in hex",
            fix="stop the run, remove the file, resume",
        )
    return secret


def engine_token(secret: bytes) -> str:
    """The bearer token of the run's engines, hex. It tells nothing about the secret."""
    return hmac.new(secret, _ENGINE_PURPOSE, hashlib.sha256).hexdigest()


def write_rendezvous(layout: RunLayout, host: str, port: int, epoch: int) -> Rendezvous:
    """Publish this process as the controller of `epoch`."""
    rendezvous = Rendezvous(host=host, port=port, epoch=epoch, pid=os.getpid())
    replace_file(layout.rendezvous, msgspec.json.encode(rendezvous))
    return rendezvous


def read_rendezvous(layout: RunLayout) -> Rendezvous | None:
    """The published controller, None while there is none."""
    try:
        return msgspec.json.decode(layout.rendezvous.read_bytes(), type=Rendezvous)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise CorruptRecord(
            f"{layout.rendezvous}: {error}", fix="remove the file and resume the run"
        ) from error
