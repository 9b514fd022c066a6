"""The pattern grammar: one line that names every layer of a model.

.. code-block:: text

    pattern := item (space item)*
    item    := name [ "(" [ argument ("," argument)* ] ")" ] [ "*" count ]
    argument := keyword "=" value | pattern
    value   := number | true | false | none | word | "quoted text"

Keywords are constructor keywords. Only a wrapper takes a pattern as argument: its core. Tasks are
named by the same grammar: ``copying(max_len=20)``.
"""

import inspect
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from stateline.errors import InputError, unknown_name

Value = int | float | bool | str | None
T = TypeVar("T")

_TOKEN = re.compile(r"\s*(?:(?P<word>[^\s(),=*\"]+)|(?P<text>\"[^\"]*\")|(?P<mark>[(),=*]))")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_CONSTANTS: Mapping[str, Value] = {"true": True, "false": False, "none": None}


class Item(NamedTuple):
    """One name of a pattern, with its keywords, its core (wrappers only) and its repeat count."""

    name: str
    keywords: dict[str, Value]
    core: tuple["Item", ...] = ()
    repeat: int = 1


def parse_pattern(text: str) -> tuple[Item, ...]:
    """Read a pattern.

    Args:
        text: For example ``"attention(position=hard_alibi) h3*2"``.

    Returns:
        The items in order; a repeated item stands once, with its count.

    Raises:
        InputError: If the text does not follow the grammar; the message marks the place.

    Example:
        >>> parse_pattern("h3*2")
        (Item(name='h3', keywords={}, core=(), repeat=2),)
        >>> parse_pattern("attention(n_heads=4 h3")
        Traceback (most recent call last):
        ...
        stateline.errors.InputError: malformed pattern: expected ',' or ')' at <here>: \
attention(n_heads=4 <here>h3
    """
    parser = _Parser(text)
    try:
        items = parser.items()
    except RecursionError as error:
        raise InputError(f"malformed pattern: nested too deep: {text:.40} ...") from error
    if parser.kind != "end":
        raise parser.error("a layer name")
    return items


class _Parser:
    """Recursive descent over one token of look-ahead."""

    def __init__(self, text: str) -> None:
        self.text, self.end = text, 0
        self.advance()

    def advance(self) -> str:
        """Step to the next token and return the one left behind."""
        left = getattr(self, "token", "")
        match = _TOKEN.match(self.text, self.end)
        if match is None:
            rest = self.text[self.end :]
            self.start = self.end + len(rest) - len(rest.lstrip())
            self.kind, self.token = ("end", "") if not rest.strip() else ("other", rest.strip()[0])
        else:
            self.kind = str(match.lastgroup)
            self.token, self.end = match[self.kind], match.end()
            self.start = self.end - len(self.token)
        return left

    def error(self, wanted: str) -> InputError:
        marked = f"{self.text[: self.start]}<here>{self.text[self.start :]}"
        line = " ".join(marked.split())
        return InputError(f"malformed pattern: expected {wanted} at <here>: {line}")

    def take(self, mark: str) -> bool:
        """Step over ``mark`` if it is next."""
        if self.kind == "mark" and self.token == mark:
            self.advance()
            return True
        return False

    def items(self) -> tuple[Item, ...]:
        items = [self.item()]
        while self.kind == "word":
            items.append(self.item())
        return tuple(items)

    def item(self) -> Item:
        if self.kind != "word" or not _NAME.match(self.token):
            raise self.error("a layer name")
        return self.item_after(self.advance())

    def item_after(self, name: str) -> Item:
        keywords: dict[str, Value] = {}
        core: tuple[Item, ...] = ()
        if self.take("(") and not self.take(")"):
            while True:
                core = self.argument(keywords, core)
                if self.take(")"):
                    break
                if not self.take(","):
                    raise self.error("',' or ')'")
        return Item(name, keywords, core, self.count() if self.take("*") else 1)

    def argument(self, keywords: dict[str, Value], core: tuple[Item, ...]) -> tuple[Item, ...]:
        """Read ``keyword=value`` into ``keywords``, or a pattern, which is returned as the core."""
        if self.kind != "word" or not _NAME.match(self.token):
            raise self.error("keyword=value or a pattern")
        start = self.start
        name = self.advance()
        if self.take("="):
            if name in keywords:
                self.start = start
                raise self.error(f"each keyword once, not {name!r} again,")
            keywords[name] = self.value()
            return core
        if core:
            self.start = start
            raise self.error("keyword=value, since the core is already given,")
        first = self.item_after(name)
        return (first, *self.items()) if self.kind == "word" else (first,)

    def value(self) -> Value:
        if self.kind == "text":
            return self.advance()[1:-1]
        if self.kind != "word":
            raise self.error("a value")
        word = self.advance()
        if word.lower() in _CONSTANTS:
            return _CONSTANTS[word.lower()]
        for number in (int, float):
            try:
                return number(word)
            except ValueError:
                continue
        return word

    def count(self) -> int:
        if self.kind != "word" or not self.token.isdecimal() or int(self.token) == 0:
            raise self.error("a repeat count of at least 1")
        if len(self.token) > 4:
            raise self.error("a repeat count of at most 9999")
        return int(self.advance())


def format_pattern(items: tuple[Item, ...]) -> str:
    """The pattern as text; ``parse_pattern`` reads it back to the same items.

    Example:
        >>> format_pattern(parse_pattern("ladder( h3 * 2,passes = 4 )"))
        'ladder(h3*2, passes=4)'
    """
    return " ".join(_format_item(item) for item in items)


def _format_item(item: Item) -> str:
    arguments = [format_pattern(item.core)] if item.core else []
    arguments += [f"{key}={_format_value(value)}" for key, value in item.keywords.items()]
    call = f"({', '.join(arguments)})" if arguments else ""
    return f"{item.name}{call}" + (f"*{item.repeat}" if item.repeat > 1 else "")


def _format_value(value: Value) -> str:
    if isinstance(value, str):
        return (
            value
            if re.fullmatch(r"[^\s(),=*\"]+", value) and not _is_special(value)
            else f'"{value}"'
        )
    return "none" if value is None else str(value).lower()


def _is_special(text: str) -> bool:
    """Whether the bare word would be read back as something other than text."""
    try:
        float(text)
    except ValueError:
        return text.lower() in _CONSTANTS
    return True


def construct(
    kind: str, name: str, build: Callable[..., T], keywords: Mapping[str, Any], *given: Any
) -> T:
    """Call ``build(*given, **keywords)`` after checking the keywords against its signature.

    Args:
        kind: What is built, for messages: ``"layer"``, ``"task"``.
        name: Its name, for messages.
        build: A class or function; its keyword-only parameters are what a pattern may set.
        keywords: What the pattern set; none is a word where a name may be "none", and not None.
        *given: Positional arguments that the pattern does not set.

    Returns:
        What ``build`` returns.

    Raises:
        InputError: If a keyword is unknown or a value is of the wrong type.
    """
    parameters = inspect.signature(build).parameters.values()
    settable = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    hints = get_type_hints(build.__init__ if inspect.isclass(build) else build)
    values = dict(keywords)
    for key, value in keywords.items():
        if key not in settable:
            raise unknown_name(f"keyword of {kind} {name!r}", key, settable)
        hint = hints.get(key, object)
        if value is None and not _fits(None, hint) and _fits("none", hint):
            values[key] = "none"
        _check_type(f"{kind} {name!r}", key, values[key], hint)
    return build(*given, **values)


def check_settings(owner: str, settings: object) -> None:
    """Check every field of a dataclass against its annotation, as ``construct`` does keywords.

    Args:
        owner: Whose settings they are, for messages.
        settings: The dataclass instance.

    Raises:
        InputError: If a value is of the wrong type.
    """
    for name, hint in get_type_hints(type(settings)).items():
        _check_type(owner, name, getattr(settings, name), hint)


def _check_type(owner: str, name: str, value: object, hint: Any) -> None:
    if not _fits(value, hint):
        raise InputError(f"{owner} wants {name} to be {_describe(hint)}, got {value!r}")


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of the grammar is of the annotated type (an int serves as a float)."""
    if hint in (Any, object):
        return True
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, (int, float)) and math.isfinite(value)
    kind = origin or hint
    if kind is Mapping and isinstance(value, Mapping):
        return all(_fits(part, get_args(hint)[1]) for part in value.values())
    return not isinstance(kind, type) or isinstance(value, kind)


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    if origin is Mapping:
        return f"a mapping to {_describe(get_args(hint)[1])}"
    names = {type(None): "none", float: "a finite number"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))
