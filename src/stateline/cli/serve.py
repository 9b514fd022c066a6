"""Serve a trained model over HTTP, with OpenAI's interfaces; states are kept between requests."""

import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from stateline.devices import add_device_option, add_dtype_option, resolve_dtype
from stateline.errors import InputError

KEY = "STATELINE_KEY"
"""The environment variable that may hold the key."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option = parser.add_argument
    option("run", type=str, help="folder of a trained model, a run or a checkpoint")
    option("--host", type=str, default="127.0.0.1", help="address; the default is this machine's")
    option("--port", type=int, default=8000, help="0 takes a free one")
    option("--name", type=str | None, default=None, help="of the model; by default its folder's")
    option("--key", type=str | None, default=None, help=f"clients must send it; or set {KEY}")
    option("--states", type=str | None, default=None, help="folder for states over restarts")
    option("--state_memory", type=int, default=256, help="MiB of kept states in memory")
    option("--state_disk", type=int, default=4096, help="MiB of kept states in the folder")
    option("--every", type=int, default=1024, help="tokens between states kept within a prompt")
    option("--max_rows", type=int, default=64, help="texts that are decoded together")
    option("--max_waiting", type=int, default=1024, help="texts that wait for a row")
    option("--max_new_tokens", type=int, default=4096, help="new tokens of one text")
    option("--max_length", type=int, default=1 << 20, help="tokens of one text with its new ones")
    option("--max_seconds", type=float, default=600.0, help="time of one text")
    option("--max_memory", type=int, default=2048, help="MiB of the states of all rows")
    add_device_option(parser)
    add_dtype_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Serve until the process is told to end."""
    given = parser.parse_args(arguments)
    key = given.key or os.environ.get(KEY) or None

    try:
        from stateline.serve import Limits, listen, make_app, make_server
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs the package {error.name}: pip install 'stateline[serve]'"
        ) from error
    from stateline.devices import resolve_device
    from stateline.generate import PrefixStates, load_run
    from stateline.runs.folder import check_imports

    limits = Limits(
        rows=given.max_rows,
        waiting=given.max_waiting,
        new_tokens=given.max_new_tokens,
        length=given.max_length,
        seconds=given.max_seconds,
        memory=given.max_memory << 20,
    )
    check_imports(Path(given.run))
    device, dtype = resolve_device(given.device), resolve_dtype(given.dtype)
    model, tokenizer = load_run(given.run, device=device, dtype=dtype)
    name = given.name or Path(given.run).resolve().name
    memory, disk = given.state_memory << 20, given.state_disk << 20
    prefixes = PrefixStates(model, every=given.every, memory=memory, folder=given.states, disk=disk)
    if key is None and not _is_loopback(given.host):
        print(f"stateline: anyone who reaches {given.host} can use it: --key", file=sys.stderr)

    listening = listen(given.host, given.port)
    print(f"{name} at http://{given.host}:{listening.getsockname()[1]}/v1", flush=True)
    app = make_app(prefixes, tokenizer, name, limits=limits, key=key)
    make_server(app).run(sockets=[listening])
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
