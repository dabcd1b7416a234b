"""Main module of an SGLang server of ours: binds a free port, publishes it once it serves, dies with its parent.

    PYTHON -m gyre_hpc.engines.sglang.server --port-file FILE --host HOST [--parent PID] [--api-key-stdin] -- SGLANG-ARGUMENT...

The port is taken by a socket of this process that stays bound and never listens, so that nobody else is given it, while
SGLang's own socket may share it (SO_REUSEADDR). The bearer token comes on stdin and reaches the HTTP server alone: SGLang
writes its arguments to its log. SGLang starts its other processes by `spawn`, which imports this module first: what has to
come before `import sglang` stands at its top. It runs in the environment of SGLang and imports nothing else at the top.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

LISTEN_POLL_S = 0.05
FROM, BEFORE = (0, 5, 21), (0, 5, 24)
"""Versions of SGLang whose page keys, checksums and control calls are those that are worked out here."""
CPU = "SGLANG_USE_CPU_ENGINE"
"""Environment variable by which SGLang, and each process of it, knows that it serves without a GPU."""

if os.environ.get(CPU) == "1":
    from gyre_hpc.engines.sglang.cpu import prepare

    prepare()


def reserve(host: str) -> socket.socket:
    """A socket bound to a free port of `host` that never listens: the port stays ours until it is closed."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def publish(port_file: Path, host: str, port: int) -> None:
    """Write "HOST PORT" once the port answers: SGLang says that it is ready while its HTTP server still starts."""
    while True:
        try:
            socket.create_connection((host, port)).close()
            break
        except OSError:
            time.sleep(LISTEN_POLL_S)
    partial = port_file.with_name(f".{port_file.name}.{os.getpid()}")
    partial.write_text(f"{host} {port}\n")
    partial.rename(port_file)


def require_version(version: str) -> None:
    """Ends the process unless this is an SGLang whose pages and checksums are known: others would be found out one by one, late."""
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not FROM <= parts < BEFORE:
        known = f">={'.'.join(map(str, FROM))},<{'.'.join(map(str, BEFORE))}"
        sys.exit(f"sglang {version} in {sys.prefix}: needs {known}; set engine.sglang.python")


def main(argv: list[str] | None = None) -> None:
    """Serve until told to end by SIGINT, or by SIGTERM if it has no parent to judge it."""
    options = _arguments(argv)
    require_version(importlib.metadata.version("sglang"))
    if options.parent is not None:
        _die_with(options.parent)
        # SIGTERM is Slurm's to the whole step: the parent judges it. SGLang's children inherit that it is ignored.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    token = sys.stdin.read() if options.api_key_stdin else ""
    if options.api_key_stdin and not token:
        sys.exit("--api-key-stdin: no token came on stdin")
    with reserve(options.host) as holder:
        port = holder.getsockname()[1]
        _serve(options, port, token)


def _keep_ignoring() -> None:
    """The HTTP server and SGLang would each install a handler that ends this process."""
    import uvicorn.server
    from sglang.srt.managers.tokenizer_manager import SignalHandler

    uvicorn.server.HANDLED_SIGNALS = (signal.SIGINT,)
    SignalHandler.sigterm_handler = lambda *args, **options: None


def _serve(options: argparse.Namespace, port: int, token: str) -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import auth, kill_process_tree

    load_plugins()
    if options.parent is not None:
        _keep_ignoring()
    # After the death of a scheduler it would look into the dead for 10 s, while calls could go on elsewhere.
    TokenizerManager.dump_requests_before_crash = lambda *args, **options: None
    if token:
        auth.add_api_key_middleware(http_server.app, api_key=token, admin_api_key=token)
    arguments = prepare_server_args(
        [*options.sglang, "--host", options.host, "--port", str(port), "--skip-server-warmup"]
    )
    arguments.resolve_once()
    if "--enable-hierarchical-cache" in options.sglang:
        _compile_page_hash()
    try:
        http_server.launch_server(
            arguments,
            launch_callback=functools.partial(publish, options.port_file, options.host, port),
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _compile_page_hash() -> None:
    """SGLang compiles the hash of its page keys at first use, in minutes; a flush meanwhile would end it."""
    from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash

    get_native_hash([0], None)


def _die_with(parent: int) -> None:
    from gyre_hpc.launch.signals import die_with_parent

    die_with_parent(parent)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.engines.sglang.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port-file", type=Path, required=True, help="written with 'HOST PORT' once it serves"
    )
    parser.add_argument("--api-key-stdin", action="store_true", help="the bearer token comes on stdin")
    parser.add_argument("--parent", type=int, help="pid of the starting process, to die with it")
    parser.add_argument("sglang", nargs="*", help="arguments of sglang.launch_server, after --")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
