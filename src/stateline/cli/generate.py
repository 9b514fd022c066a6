"""Continue a prompt with a trained model, token by token; the state can be kept."""

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from stateline.cli.options import StateDType, add_device_and_dtype, add_weights, user_folder
from stateline.cli.parser import Parser
from stateline.errors import InputError
from stateline.files import check_writable


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("run", "folder of a trained model, a run or a checkpoint")
    option, switch = parser.option, parser.switch
    option("prompt", str, None, "text, or token numbers without a tokenizer")
    option("prompts", str, None, "file with one prompt per line; prints JSON")
    switch("stream", "read a prompt of any length from stdin")
    switch("chat", "each prompt is a message of a chat, written by the model's template")
    option("system", str, None, "with --chat: a message of the system before the first")
    switch("special_tokens", "show special tokens, such as those that end a turn")
    option("max_new_tokens", int, 256, "largest number of new tokens")
    option("temperature", float, 0.8, "0 takes the likeliest token")
    option("top_k", int, None, "only the k likeliest tokens")
    option("top_p", float, None, "only the likeliest tokens, up to this total probability")
    option("min_p", float, None, "only tokens with this share of the largest probability")
    option("repetition_penalty", float, 1.0, "above 1, earlier tokens are less likely (CTRL)")
    option("presence_penalty", float, 0.0, "subtracted from logits of tokens that were chosen")
    option("frequency_penalty", float, 0.0, "the same for each time that a token was chosen")
    option("min_tokens", int, 0, "number of tokens before which nothing ends a text")
    switch("ignore_eos", "the model's end tokens do not end a text")
    option("stop_token_ids", list[int], [], "numbers of tokens that end a text, too")
    parser.add_argument("--stop", action="append", default=[], help="end before it; repeatable")
    option("seed", int, None, "default 0, or the seed of --state")
    switch("log_probs", "one line per token: number, log-prob., text")
    option("state_dtype", StateDType, None, "dtype of states between tokens; by default their own")
    option("save_state", str, None, "keep the state in this file at the end")
    option("state", str, None, "continue from the state in this file")
    option("draft", str, None, "folder of a faster model, which proposes tokens")
    option("ahead", int, 4, "tokens that the draft proposes at a time")
    option("prefix_cache", str, None, "folder that keeps states of texts that were read")
    switch("force", "accept another model's state; let memory grow")
    add_device_and_dtype(parser)
    add_weights(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Print the continuation as it comes."""
    given = parser.parse_args(arguments)
    _check(given)
    user_folder(given.run)

    from stateline.cli.continuing import continue_texts

    continue_texts(given)
    return 0


def _check(given: Namespace) -> None:
    """Refuse options that contradict each other; without a prompt or a state, prompt a newline."""
    ways = [name for name in ("prompt", "prompts", "stream") if given[name] not in (None, False)]
    if len(ways) > 1:
        raise InputError(f"give one of --prompt, --prompts and --stream, got {' and '.join(ways)}")
    if given.chat and (given.stream or not ways):
        raise InputError("--chat needs the message: give it as --prompt, or several in --prompts")
    if given.system is not None and (not given.chat or given.state is not None):
        raise InputError("--system begins a chat: give it with --chat, and not with --state")
    if given.prompts is not None and given.save_state is not None:
        raise InputError(
            "--save_state keeps one text, but --prompts has several: give one --prompt"
        )
    if given.save_state is not None:
        check_writable(Path(given.save_state))
    if given.draft is not None:
        _check_draft(given)
    if given.prefix_cache is not None and given.state is not None:
        raise InputError(
            "--prefix_cache finds states by the text, which --state does not hold: give one of them"
        )
    if not ways and given.state is None:
        given.prompt = "\n"


def _check_draft(given: Namespace) -> None:
    """Refuse what a draft does not do."""
    if given.prompts is not None:
        raise InputError("--draft decodes one text: give one --prompt, or leave out --draft")
    if given.presence_penalty or given.frequency_penalty or given.min_tokens:
        raise InputError(
            "--draft proposes tokens without penalties: leave out --presence_penalty, "
            "--frequency_penalty and --min_tokens, or --draft"
        )
    if given.state_dtype is not None:
        raise InputError(
            "--draft checks several tokens in one call and rounds no state between them: "
            "leave out --state_dtype or --draft"
        )
