"""Chats: a published model's own template writes messages as the text that it was trained on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stateline.data.tokenizer import Tokenizer
from stateline.errors import InputError, reason

Message = Mapping[str, Any]
"""A message, with ``role`` and ``content``."""

_SAID = "stateline-said-this"
"""Stands for a message whose place in the text is looked for."""


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    prompt: bool = True,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The text of a chat, by the template that came with a tokenizer.

    It is what ``apply_chat_template`` of transformers gives. The text has its special tokens, so
    encode it by ``tokenizer.encode``, which adds none.

    Args:
        tokenizer: A tokenizer with a ``chat_template``.
        messages: The messages, at least one.
        prompt: Whether the beginning of the assistant's answer follows.
        variables: More variables of the template, such as ``enable_thinking``.

    Raises:
        InputError: If there is no template, or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "the model has no template of chats (chat_template.jinja): give it plain text"
        )
    given = {**tokenizer.special_names, **variables}
    said = [{key: value for key, value in one.items() if value is not None} for one in messages]
    try:
        template = _compiled(tokenizer.chat_template)
        return template.render(given, messages=said, add_generation_prompt=prompt)
    except Exception as error:  # templates raise many types
        raise InputError(
            f"the template of chats does not take these messages: {reason(error)}"
        ) from error


def next_turn(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """The text of further messages, which follows an answer in a chat; it begins with its end.

    Raises:
        InputError: As for :func:`chat_text`, or if the template does not write answers as they are.
    """
    said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _SAID}]
    _, found, rest = chat_text(tokenizer, [*said, *messages]).partition(_SAID)
    if not found:
        raise InputError("the template of chats changes answers: give the whole chat")
    return rest


def turn_end(tokenizer: Tokenizer) -> int | None:
    """The special token that ends an answer in a chat, such as ``<|im_end|>``, if there is one."""
    said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _SAID}]
    try:
        _, _, rest = chat_text(tokenizer, said, prompt=False).partition(_SAID)
    except InputError:  # a template may need more than a question and an answer
        return None
    tokens = tokenizer.encode(rest.lstrip()).tolist()
    return tokens[0] if tokens and tokens[0] in tokenizer.special_tokens else None


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """A template, in a sandbox and with the names that transformers gives to templates."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _json
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return sandbox.from_string(template)


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, and changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
