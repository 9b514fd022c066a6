"""Serve a model over HTTP, with OpenAI's completions, chats and responses; states are kept."""

import ipaddress
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from stateline.cli.options import (
    add_device_and_dtype,
    add_key,
    add_weights,
    key_of,
    open_model,
    user_folder,
)
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
    about = "largest number of tokens of one text, new ones included; by default the model's"
    option("max_length", int, None, about)
    option("max_seconds", float, 600.0, "seconds from the arrival of a text to its end")
    option("max_memory", int, 2048, "largest MiB of the states of all rows")
    option("cors", list[str], [], "sites whose pages may use it; * are all", metavar="ORIGIN")
    add_device_and_dtype(parser)
    add_weights(parser)


_LIMITS = ("max_rows", "max_waiting", "max_new_tokens", "max_length", "max_memory")

LONGEST = 1 << 20
"""Tokens of one text if neither an option nor the model's files limit it."""


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Serve until a signal ends the process."""
    given = parser.parse_args(arguments)
    user_folder(given.run)
    at_least(1, **{name: given[name] for name in _LIMITS})
    try:
        from stateline.serve import Limits, listen, make_app, make_server
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs the package {error.name}: pip install 'stateline[serve]'"
        ) from error
    from stateline.generate import PrefixStates
    from stateline.models.inputs import warn_beyond_training

    model, tokenizer = open_model(given)
    limits = Limits(
        rows=given.max_rows,
        waiting=given.max_waiting,
        new_tokens=given.max_new_tokens,
        length=given.max_length or model.max_len or model.config.trained_len or LONGEST,
        seconds=given.max_seconds,
        memory=given.max_memory << 20,
    )
    if given.max_length:
        warn_beyond_training(model.config, given.max_length)
    name, key = given.name or Path(given.run).resolve().name, key_of(given)
    memory, disk = given.state_memory << 20, given.state_disk << 20
    prefixes = PrefixStates(model, every=given.every, memory=memory, folder=given.states, disk=disk)
    local = _is_loopback(given.host)
    if key is None and not local:
        _tell(f"anyone who reaches {given.host} can use it: set --key")
    if tokenizer.chat_template:
        _tell("the model is for chats, but /v1/completions is plain text: use /v1/chat/completions")

    listening = listen(given.host, given.port)
    app = make_app(
        prefixes,
        tokenizer,
        name,
        limits=limits,
        key=key,
        local=local and key is None,
        origins=given.cors,
    )
    try:
        print(f"{name} at http://{given.host}:{listening.getsockname()[1]}/v1", flush=True)
        make_server(app).run(sockets=[listening])
    except KeyboardInterrupt as error:
        states = f"states are kept in {given.states}" if given.states else "its states are gone"
        _tell(f"the server has ended; {states}")
        return 128 + (error.args or (signal.SIGINT,))[0]
    return 0


def _tell(line: str) -> None:
    print(f"stateline: {line}", file=sys.stderr)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
