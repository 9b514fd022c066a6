"""Serve a model over HTTP, with OpenAI's completions and responses; states are kept."""

import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

from stateline.cli.options import add_device_and_dtype, add_key, key_of, open_model
from stateline.cli.parser import Parser
from stateline.errors import InputError
from stateline.settings import at_least


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("run", "folder of a trained model, a run or a checkpoint")
    option = parser.option
    option("host", str, "127.0.0.1", "address; the default serves only this machine")
    option("port", int, 8000, "port; 0 takes a free one")
    option("name", str, None, "name of the model; by default of its folder")
    add_key(parser, "key that clients must send")
    option("states", str, None, "folder that keeps states over restarts")
    option("state_memory", int, 256, "largest MiB of kept states in memory")
    option("state_disk", int, 4096, "largest MiB of kept states in the folder")
    option("every", int, 1024, "tokens between states kept within a prompt")
    option("max_rows", int, 64, "largest number of texts that are decoded together")
    option("max_waiting", int, 1024, "largest number of texts that wait for a row")
    option("max_new_tokens", int, 4096, "largest number of new tokens of one text")
    option("max_length", int, 1 << 20, "largest number of tokens of one text, new ones included")
    option("max_seconds", float, 600.0, "seconds from the arrival of a text to its end")
    option("max_memory", int, 2048, "largest MiB of the states of all rows")
    add_device_and_dtype(parser)


_LIMITS = ("max_rows", "max_waiting", "max_new_tokens", "max_length", "max_memory")


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Serve until a signal ends the process."""
    given = parser.parse_args(arguments)
    at_least(1, **{name: given[name] for name in _LIMITS})
    try:
        from stateline.serve import Limits, listen, make_app, make_server
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs the package {error.name}: pip install 'stateline[serve]'"
        ) from error
    from stateline.generate import PrefixStates

    limits = Limits(
        rows=given.max_rows,
        waiting=given.max_waiting,
        new_tokens=given.max_new_tokens,
        length=given.max_length,
        seconds=given.max_seconds,
        memory=given.max_memory << 20,
    )
    model, tokenizer = open_model(given)
    name, key = given.name or Path(given.run).resolve().name, key_of(given)
    memory, disk = given.state_memory << 20, given.state_disk << 20
    prefixes = PrefixStates(model, every=given.every, memory=memory, folder=given.states, disk=disk)
    if key is None and not _is_loopback(given.host):
        print(f"stateline: anyone who reaches {given.host} can use it: set --key", file=sys.stderr)

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
