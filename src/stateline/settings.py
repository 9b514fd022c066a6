"""Checks of settings against type annotations."""

import inspect
import math
import types
from abc import ABCMeta
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from stateline.errors import InputError, check_choice
from stateline.pattern import format_value, parse_value

INT64 = range(-(2**63), 2**63)
"""Integers that tensors, files and random generators can hold."""


class Range(NamedTuple):
    """The numbers that a setting can have, in its annotation: ``Annotated[float, Range(...)]``.

    Attributes:
        words: The range in words, for messages.
        has: Whether a number is in it.
    """

    words: str
    has: Callable[[float], bool]

    def __repr__(self) -> str:
        return self.words


def within(least: float, most: float = math.inf) -> Range:
    """The numbers from a least to a largest one; these are in it.

    Example:
        >>> within(1), within(1, 26)
        (of at least 1, from 1 to 26)
    """
    end = f"{most:,}" if isinstance(most, int) else f"{most:g}"
    words = f"of at least {least}" if most == math.inf else f"from {least} to {end}"
    return Range(words, lambda number: least <= number <= most)


Positive = Annotated[float, Range("above 0", lambda number: number > 0)]
NotNegative = Annotated[float, within(0)]
Count = Annotated[int, within(1)]
Size = Annotated[int, within(0)]
Share = Annotated[float, within(0, 1)]
Fraction = Annotated[float, Range("from 0 to below 1", lambda number: 0 <= number < 1)]
Between = Annotated[float, Range("above 0 and below 1", lambda number: 0 < number < 1)]
Factor = Annotated[float, Range("above 0, at most 256", lambda number: 0 < number <= 256)]
"""How many times as wide as the model a part of a layer is."""


class Checked(ABCMeta):
    """The door of classes with settings: a constructor's arguments fit its annotations.

    What is given is checked once, before the constructor runs; defaults are trusted. Numbers of
    NumPy and PyTorch become Python's, and ``None`` becomes ``"none"`` where the annotation allows
    the word but not the value. What an annotation cannot say, such as how two arguments go
    together, is for the constructor. Messages name the class, without ``Settings``, or its
    ``owner``.
    """

    def __call__(cls, *given: Any, **keywords: Any) -> Any:
        """Make an instance.

        Raises:
            InputError: If a keyword is unknown, or a value has the wrong type or is out of range.
        """
        owner, hints, kinds = _owner(cls), _hints(cls), {p.name: p.kind for p in _parameters(cls)}
        places = [n for n, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        taken = places[: len(given)]
        if inspect.Parameter.VAR_KEYWORD not in kinds.values():
            for name in keywords:
                check_choice(f"keyword of {owner}", name, [n for n in hints if n not in taken])
        first = [_checked(owner, n, v, hints[n]) for n, v in zip(taken, given, strict=False)]
        named = {n: _checked(owner, n, v, hints.get(n, object)) for n, v in keywords.items()}
        return super().__call__(*first, *given[len(first) :], **named)

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor."""
        return inspect.Signature(_parameters(cls))


class Settings(metaclass=Checked):
    """Settings as a value: base of frozen dataclasses whose annotations say type and range.

    A subclass that also compares its fields does so in ``__post_init__``.

    Raises:
        InputError: If a keyword is unknown, or a value has the wrong type or is out of range.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class NormSettings(Settings):
        ...     eps: NotNegative = 1e-5
        >>> NormSettings(eps=-1)
        Traceback (most recent call last):
        ...
        stateline.errors.InputError: Norm wants eps to be a finite number of at least 0, got -1
    """


class Choice(Settings):
    """A value of a setting that has settings of its own: ``position=rope(base=500000)``.

    A setting whose annotation names the class takes an instance, and what a pattern has: its word,
    alone or with keywords.

    Attributes:
        owner: The word.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Rms(Choice):
        ...     owner = "rms"
        ...     eps: NotNegative = 1e-6
        >>> @dataclass(frozen=True, kw_only=True)
        ... class NormSettings(Settings):
        ...     kind: Literal["none"] | Rms = "none"
        >>> NormSettings(kind="rms(eps=0.1)").kind, str(Rms(eps=0.1)), str(Rms())
        (Rms(eps=0.1), 'rms(eps=0.1)', 'rms')
    """

    owner: ClassVar[str]

    def __str__(self) -> str:
        """What a pattern has; what is left out has its default."""
        own: tuple[Field[Any], ...] = fields(self)  # type: ignore[arg-type]  # of a dataclass
        given = {f.name: getattr(self, f.name) for f in own}
        changed = {f.name: given[f.name] for f in own if given[f.name] != f.default}
        return format_value(
            self.owner, {n: str(v) if isinstance(v, Choice) else v for n, v in changed.items()}
        )


def _choices(hint: Any) -> Iterator[type[Choice]]:
    """The classes of choices that an annotation names."""
    if inspect.isclass(hint) and issubclass(hint, Choice):
        yield hint
    if get_origin(hint) in (Union, types.UnionType):
        for option in get_args(hint):
            yield from _choices(option)


def _chosen(text: str, hint: Any) -> Any:
    """The choice that a text spells, where the annotation has it; otherwise the text."""
    known = {kind.owner: kind for kind in _choices(hint)}
    if not known:
        return text
    name, keywords, *_ = parse_value(text) if "(" in text else (text, {})
    return known[name](**keywords) if name in known else text


def _owner(cls: type) -> str:
    return str(getattr(cls, "owner", cls.__name__.removesuffix("Settings")))


def _parameters(cls: type) -> list[inspect.Parameter]:
    constructor: Any = cls.__init__  # type: ignore[misc]
    return list(inspect.signature(constructor).parameters.values())[1:]


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a constructor's parameters, in their order."""
    constructor: Any = cls.__init__  # type: ignore[misc]
    hints = get_type_hints(constructor, include_extras=True)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p.name for p in _parameters(cls) if p.kind not in variable]
    return {name: hints.get(name, object) for name in named}


def _checked(owner: str, name: str, value: Any, hint: Any) -> Any:
    """A value that fits, in Python's numbers."""
    value = _plain(value)
    if value is None and not _fits(None, hint) and _fits("none", hint):
        value = "none"
    if isinstance(value, str):
        value = _chosen(value, hint)
    check_type(owner, name, value, hint)
    return value


def check_settings(owner: str, settings: object) -> None:
    """Check every field of a dataclass instance against its annotation.

    Numbers of NumPy and PyTorch become Python's, which files can hold.

    Args:
        owner: Whose settings they are, for messages.
        settings: The dataclass instance.

    Raises:
        InputError: If a value has the wrong type or is out of range.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        if get_origin(hint) is not ClassVar:
            value = _plain(getattr(settings, name))
            check_type(owner, name, value, hint)
            object.__setattr__(settings, name, value)  # it may be frozen


def at_least(least: float, **given: float | None) -> None:
    """Check that settings are not below a limit; ``None`` is not checked.

    Raises:
        InputError: If one is below the limit, or no number.

    Example:
        >>> at_least(1, length=8, batch_size=None)
    """
    for name, value in given.items():
        number = _plain(value)
        if number is not None and not (isinstance(number, int | float) and number >= least):
            raise InputError(f"{name} must be at least {least}, got {name}={value}")


def check_kind(name: str, value: object, kind: type, example: str) -> None:
    """Check that an argument of a function is of a class.

    Args:
        name: Name of the argument.
        value: What was given.
        kind: The class.
        example: What could be given, for the message.

    Raises:
        InputError: If it is not.

    Example:
        >>> check_kind("text", "copying", str, "'copying'")
    """
    if not isinstance(value, kind):
        raise InputError(
            f"{name} must be a {kind.__name__}, got a {type(value).__name__}: give such as "
            f"{example}"
        )


def check_unwrapped(name: str, value: object) -> None:
    """Refuse a module around the one that is wanted, such as DDP, DataParallel, AveragedModel.

    Args:
        name: Name of the argument.
        value: What was given.

    Raises:
        InputError: If it has the wanted module as ``.module``.
    """
    if callable(getattr(getattr(value, "module", None), "parameters", None)):
        raise InputError(
            f"{name} must not be wrapped, got a {type(value).__name__} around it: give its .module"
        )


def uncompiled(module: Any) -> Any:
    """The module inside ``torch.compile``, whose names and settings are those of the module."""
    return getattr(module, "_orig_mod", module)


def check_keywords(
    owner: str, kind: type, given: Mapping[str, Any], *, without: Container[str] = ()
) -> None:
    """Check some fields of a dataclass, by name, before there is an instance.

    Args:
        owner: Whose settings they are, for messages.
        kind: The dataclass.
        given: Values by name.
        without: Fields that cannot be set.

    Raises:
        InputError: If a name is unknown or a value has the wrong type.
    """
    hints = {name: hint for name, hint in _hints(kind).items() if name not in without}
    for name, value in given.items():
        check_choice(f"setting of {owner}", name, hints)
        check_type(owner, name, value, hints[name])


def _plain(value: Any) -> Any:
    """Python's numbers for those of NumPy or PyTorch, also in mappings; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.item() if getattr(value, "shape", None) == () else value


def check_type(owner: str, name: str, value: object, hint: Any) -> None:
    """Refuse a value that does not fit its annotation, or that 64 bits do not hold.

    Args:
        owner: Whose setting it is, for messages.
        name: Its name.
        value: What was given.
        hint: The annotation.

    Raises:
        InputError: If the value has the wrong type or is out of range.
    """
    if isinstance(value, int) and int(value) not in INT64:
        raise InputError(f"{owner} wants {name} to fit into 64 bits, got a larger number")
    if not _fits(value, hint):
        raise InputError(f"{owner} wants {name} to be {describe(hint)}, got {_shown(value)}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the annotated type; an int is accepted where a float is wanted."""
    if hint in (Any, object):
        return True
    origin = get_origin(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if origin is Annotated:
        kind, *notes = get_args(hint)
        ranges = (note for note in notes if isinstance(note, Range))
        return _fits(value, kind) and all(one.has(value) for one in ranges)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    if isinstance(value, int) and int(value) not in INT64:
        return False
    if hint is float:
        return isinstance(value, int | float) and math.isfinite(value)
    kind = origin or hint
    if kind is Mapping and isinstance(value, Mapping):
        key, part = get_args(hint)
        return all(_fits(k, key) and _fits(v, part) for k, v in value.items())
    return not isinstance(kind, type) or isinstance(value, kind)


def describe(hint: Any) -> str:
    """An annotation in words.

    Example:
        >>> describe(Literal["mean", "last"] | None), describe(float)
        ('one of mean, last or none', 'a finite number')
    """
    origin = get_origin(hint)
    if origin is Annotated:
        kind, *notes = get_args(hint)
        return " ".join([describe(kind), *(str(n) for n in notes if isinstance(n, Range))])
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        named = _one_of([word for option in options for word in _words(option)])
        parts = (named if _words(option) else describe(option) for option in options)
        return " or ".join(dict.fromkeys(parts))
    if origin is Mapping:
        key, part = get_args(hint)
        return f"a mapping from {describe(key)} to {describe(part)}"
    if words := _words(hint):
        return _one_of(words)
    names = {type(None): "none", float: "a finite number"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))


def _one_of(words: Sequence[str]) -> str:
    return "one of " + ", ".join(words)


def _words(hint: Any) -> list[str]:
    """The words that an annotation allows."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [kind.owner for kind in [hint] if inspect.isclass(kind) and issubclass(kind, Choice)]


def _shown(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not print numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]} ..."
