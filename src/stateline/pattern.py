"""The pattern grammar: one line of text that names every layer of a model.

.. code-block:: text

    h3*12                                   twelve H3 layers
    attention(position=rope) h3*2           keywords set what a layer is made of
    (h3*3 attention)*4                      a group is repeated as a whole
    ladder(h3*2 attention, passes=3)        a wrapper is applied to a pattern, its core
    parallel(attention, mamba2)             or to several

    pattern  := item (space item)*
    item     := (name [arguments] | "(" pattern ")") ["*" count]
    arguments := "(" [argument ("," argument)*] ")", directly after the name
    argument := keyword "=" value | pattern
    value    := number | true | false | none | word [arguments] | "quoted text"

Only wrappers take patterns as arguments; most take one. Groups may be nested. A value that has
settings of its own takes keywords: ``attention(position=rope(base=500000))``. Tasks are named by
the same grammar: ``copying(max_len=15)``.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from stateline.errors import InputError

Value = int | float | bool | str | None

MAX_DEPTH = 16
"""Upper limit on the nesting of groups and wrappers."""

MAX_REPEAT = 9999
"""Upper limit on a repeat count; nested counts of a single item are multiplied."""

_TOKEN = re.compile(r"\s*(?:(?P<word>[^\s(),=*\"]+)|(?P<text>\"[^\"]*\")|(?P<mark>[(),=*]))")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_CONSTANTS: Mapping[str, Value] = {"true": True, "false": False, "none": None}


class Item(NamedTuple):
    """One name or one group of a pattern.

    Attributes:
        name: Name of a layer, wrapper or task; empty for a group.
        keywords: Values by keyword.
        core: What a wrapper is applied to, or what a group consists of.
        repeat: How often the item is repeated.
        others: Further patterns that a wrapper is applied to.
    """

    name: str
    keywords: dict[str, Value]
    core: tuple["Item", ...] = ()
    repeat: int = 1
    others: tuple[tuple["Item", ...], ...] = ()


def parse_pattern(text: str) -> tuple[Item, ...]:
    """Parse a pattern.

    Args:
        text: For example ``"attention(position=hard_alibi) h3*2"``.

    Returns:
        The items in order. A group that is not repeated, or that holds a single item, is replaced
        by its items.

    Raises:
        InputError: If the text does not follow the grammar; the message marks the place.

    Example:
        >>> parse_pattern("h3*2")
        (Item(name='h3', keywords={}, core=(), repeat=2, others=()),)
        >>> parse_pattern("attention(n_heads=4 h3")
        Traceback (most recent call last):
        ...
        stateline.errors.InputError: malformed pattern: expected ',' or ')' at <here>: \
attention(n_heads=4 <here>h3
    """
    parser = _Parser(text)
    items = parser.items()
    if parser.kind != "end":
        raise parser.error("a layer name")
    return items


def canonical_pattern(text: str) -> str:
    """The one spelling of a pattern that is saved, compared and shown.

    Example:
        >>> canonical_pattern("( h3 * 3 attention(rate=1e-3))*4 (s4d)*2")
        '(h3*3 attention(rate=0.001))*4 s4d*2'
    """
    return format_pattern(parse_pattern(text))


def runs(names: Sequence[str]) -> str:
    """The pattern of layers in this order; equal neighbours become a repeat count.

    Example:
        >>> runs(["attention", "attention", "sliding_attention"])
        'attention*2 sliding_attention'
    """
    groups = ((name, len(list(group))) for name, group in groupby(names))
    return " ".join(name if n == 1 else f"{name}*{n}" for name, n in groups)


class _Parser:
    """Recursive descent with one token of look-ahead."""

    def __init__(self, text: str) -> None:
        self.text, self.end, self.depth = text, 0, 0
        self.advance()

    def advance(self) -> str:
        """Move to the next token and return the current one."""
        left, before = getattr(self, "token", ""), self.end
        match = _TOKEN.match(self.text, self.end)
        if match is None:
            rest = self.text[self.end :]
            self.start = self.end + len(rest) - len(rest.lstrip())
            self.kind, self.token = ("end", "") if not rest.strip() else ("other", rest.strip()[0])
        else:
            self.kind = str(match.lastgroup)
            self.token, self.end = match[self.kind], match.end()
            self.start = self.end - len(self.token)
        self.adjacent = self.start == before
        return left

    def error(self, wanted: str) -> InputError:
        before, after = self.text[: self.start], self.text[self.start :]
        if len(before) > 200:
            before = f"... {before[-200:]}"
        if len(after) > 200:
            after = f"{after[:200]} ..."
        line = " ".join(f"{before}<here>{after}".split())
        return InputError(f"malformed pattern: expected {wanted} at <here>: {line}")

    def at(self, mark: str) -> bool:
        return self.kind == "mark" and self.token == mark

    def take(self, mark: str) -> bool:
        """Move past ``mark`` if it is the next token."""
        if self.at(mark):
            self.advance()
            return True
        return False

    def items(self) -> tuple[Item, ...]:
        found = self.item()
        while self.kind == "word" or self.at("("):
            if self.at("(") and self.adjacent:
                raise self.error("a space")
            found += self.item()
        return found

    def item(self) -> tuple[Item, ...]:
        if self.at("("):
            return self.group()
        if self.kind != "word" or not _NAME.match(self.token):
            raise self.error("a layer name")
        return (self.item_after(self.advance()),)

    def group(self) -> tuple[Item, ...]:
        """Parse a group; groups that are not needed are dissolved."""
        self.descend()
        self.advance()
        core = self.items()
        if not self.take(")"):
            raise self.error("')' (arguments follow their name without a space)")
        self.depth -= 1
        repeat = self.count()
        if repeat == 1:
            return core
        if len(core) > 1:
            return (Item("", {}, core, repeat),)
        if core[0].repeat * repeat > MAX_REPEAT:
            raise self.error(f"repeat counts of at most {MAX_REPEAT} in all before this,")
        return (core[0]._replace(repeat=core[0].repeat * repeat),)

    def item_after(self, name: str) -> Item:
        keywords, (core, *others) = self.arguments()
        return Item(name, keywords, core, self.count(), tuple(others))

    def arguments(self) -> tuple[dict[str, Value], list[tuple[Item, ...]]]:
        """Parse keywords and patterns, where there are any; an empty pattern stands for none."""
        keywords: dict[str, Value] = {}
        patterns: list[tuple[Item, ...]] = []
        if self.at("(") and self.adjacent:
            self.descend()
            self.advance()
            while not self.take(")"):
                if pattern := self.argument(keywords):
                    patterns.append(pattern)
                if not self.at(")") and not self.take(","):
                    raise self.error("',' or ')'")
            self.depth -= 1
        return keywords, patterns or [()]

    def argument(self, keywords: dict[str, Value]) -> tuple[Item, ...]:
        """Parse ``keyword=value`` into ``keywords``, or a pattern, and return it."""
        start = self.start
        if self.kind == "word" and _NAME.match(self.token):
            name = self.advance()
            if self.take("="):
                if name in keywords:
                    self.start = start
                    raise self.error(f"each keyword once, not {name!r} again,")
                keywords[name] = self.value()
                return ()
            first: tuple[Item, ...] = (self.item_after(name),)
        elif self.at("("):
            first = self.group()
        else:
            raise self.error("keyword=value or a pattern")
        more = self.kind == "word" or (self.at("(") and not self.adjacent)
        return first + (self.items() if more else ())

    def descend(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"at most {MAX_DEPTH} nested parentheses")

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
        if not (self.at("(") and self.adjacent and _NAME.match(word)):
            return word
        keywords, patterns = self.arguments()
        if patterns != [()]:
            raise self.error("keyword=value alone in a value, before this,")
        return format_value(word, keywords)

    def count(self) -> int:
        if not self.take("*"):
            return 1
        number = self.kind == "word" and self.token.isascii() and self.token.isdecimal()
        if not number or not self.token.strip("0"):
            raise self.error("a repeat count of at least 1")
        if len(self.token) > 4:
            raise self.error(f"a repeat count of at most {MAX_REPEAT}")
        return int(self.advance())


def format_pattern(items: tuple[Item, ...]) -> str:
    """Write items as text; :func:`parse_pattern` reads the same items back.

    Example:
        >>> format_pattern(parse_pattern("ladder( h3 * 2,passes = 4 ) parallel(h3,(s4d h3))"))
        'ladder(h3*2, passes=4) parallel(h3, s4d h3)'
    """
    return " ".join(_format_item(item) for item in items)


def _format_item(item: Item) -> str:
    arguments = [format_pattern(part) for part in (item.core, *item.others) if part]
    arguments += [f"{key}={_format_value(value)}" for key, value in item.keywords.items()]
    call = f"({', '.join(arguments)})" if arguments else ""
    return f"{item.name}{call}" + (f"*{item.repeat}" if item.repeat > 1 else "")


def parse_value(text: str) -> Item:
    """Parse a value with settings of its own: its name and its keywords.

    Raises:
        InputError: If the text is no such value.

    Example:
        >>> parse_value("rope(base=500000)").keywords
        {'base': 500000}
    """
    parser = _Parser(text)
    if parser.kind != "word" or not _NAME.match(parser.token):
        raise parser.error("a name")
    name = parser.advance()
    keywords, patterns = parser.arguments()
    if parser.kind != "end" or patterns != [()]:
        raise parser.error("keyword=value alone in a value, before this,")
    return Item(name, keywords)


def format_value(name: str, keywords: Mapping[str, Value]) -> str:
    """The spelling of a value with settings of its own; the inverse of :func:`parse_value`."""
    return _format_item(Item(name, dict(keywords)))


def _format_value(value: Value) -> str:
    if isinstance(value, str):
        plain = re.fullmatch(r"[^\s(),=*\"]+", value) and not _is_special(value)
        return value if plain or _has_keywords(value) else f'"{value}"'
    return "none" if value is None else str(value).lower()


def _has_keywords(text: str) -> bool:
    """Whether a text is a value with keywords, in its one spelling."""
    try:
        item = parse_value(text)
    except InputError:
        return False
    return bool(item.keywords) and format_value(item.name, item.keywords) == text


def _is_special(text: str) -> bool:
    """True if the bare word would be parsed as something other than text."""
    try:
        float(text)
    except ValueError:
        return text.lower() in _CONSTANTS
    return True
