"""Formatting numbers and names for readers."""

import re
from collections.abc import Iterable, Mapping

DASH = "\N{EN DASH}"
"""A dash, which joins the ends of a range and stands for a missing number."""


def short_number(value: int | float) -> str:
    """A count to three digits.

    Example:
        >>> short_number(310), short_number(21000), short_number(1_250_000)
        ('310', '21k', '1.25M')
    """
    return _scaled(value, {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}) or f"{value:.3g}"


def short_bytes(value: int | float) -> str:
    """A number of bytes to three digits, in powers of 1024.

    Example:
        >>> short_bytes(512), short_bytes(131072)
        ('512 B', '128 KiB')
    """
    return _scaled(value, {" GiB": 2**30, " MiB": 2**20, " KiB": 2**10}) or f"{value:.0f} B"


def _scaled(value: int | float, units: Mapping[str, int | float]) -> str:
    """``value`` in the largest unit that it reaches, or an empty text."""
    for name, unit in units.items():
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g}{name}"
    return ""


def words(name: str) -> str:
    """A name from the results with spaces for underscores.

    Example:
        >>> words("bits_per_byte")
        'bits per byte'
    """
    return name.replace("_", " ")


def count(number: int, noun: str) -> str:
    """A number and its noun.

    Example:
        >>> count(1, "seed"), count(3, "seed")
        ('1 seed', '3 seeds')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listing(names: list[str]) -> str:
    """Names joined for a sentence.

    Example:
        >>> listing(["recall", "copying", "text"])
        'recall, copying and text'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def quoted(names: Iterable[str]) -> str:
    """Quoted names, joined for a sentence."""
    return listing([f"“{name}”" for name in names])


def fold(text: str, width: int) -> str:
    r"""A pattern or a range, wrapped at ``width`` after brackets, commas, signs and spaces.

    Example:
        >>> fold("attention(position=rope) h3*2", 18)
        'attention(\nposition=rope) \nh3*2'
    """
    lines = [""]
    for piece in re.split(f"(?<=[(,=_ {DASH}])", text):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)
