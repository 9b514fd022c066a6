"""Places for the names of marks in a chart, so that no name covers another one or a mark."""

from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

CHARACTER = 7.0
"""Most pixels that a character of a name needs on average, in the widest of the usual fonts."""

LINE = 14.0
"""Pixels that a line of text needs from top to bottom."""

MARK = 6.0
"""Pixels from the middle of a mark to its edge."""

LONGEST = 150
"""Largest width of a name in pixels; longer names are cut."""

ABOVE = 12
"""Pixels above the area of a chart that names may use."""

_DISTANCES = (8.0, 18.0, 30.0, 44.0)
_Side = Literal[-1, 0, 1]
_SIDES: tuple[tuple[_Side, _Side], ...] = (
    *((1, 0), (-1, 0), (0, -1), (0, 1)),
    *((1, -1), (-1, -1), (1, 1), (-1, 1)),
)


class Box(NamedTuple):
    """A rectangle in pixels from the upper left corner of a chart's area."""

    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: "Box") -> bool:
        """Whether the two have a point in common that is not at an edge."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


class LabelPlace(NamedTuple):
    """Where a name is drawn.

    Attributes:
        dx: Pixels from the mark to the left end, the middle or the right end of the name.
        dy: Pixels from the mark to the middle of the name's height.
        align: Which of these three ends at ``dx``.
        box: The largest area that the name covers.
    """

    dx: float
    dy: float
    align: Literal["left", "center", "right"]
    box: Box


def mark_box(x: float, y: float) -> Box:
    """What a mark covers."""
    return Box(x - MARK, y - MARK, x + MARK, y + MARK)


def place_names(
    names: Sequence[tuple[str, float, float]],
    marks: Sequence[Box],
    lines: Sequence[Box],
    size: tuple[float, float],
) -> list[LabelPlace | None]:
    """A place for each name beside its mark; ``None`` where every place is covered.

    A name covers no other name and no mark. Of the remaining places, it gets the one that the
    fewest lines cross, and among equals the nearest.

    Args:
        names: Texts, each with the place of its mark in pixels.
        marks: What all marks of the chart cover.
        lines: Lines that names should not cross.
        size: Width and height of the chart's area.
    """
    taken = list(marks)
    area = Box(0.0, -ABOVE, *size)
    found: list[LabelPlace | None] = []
    for text, x, y in names:
        width = min(float(LONGEST), CHARACTER * len(text))
        free = [
            place
            for distance, sides in product(_DISTANCES, _SIDES)
            if _inside(place := _place(x, y, width, distance, sides), area)
            and not any(place.box.covers(other) for other in taken)
        ]
        best = min(free, key=lambda p: sum(p.box.covers(line) for line in lines), default=None)
        found.append(best)
        taken += [best.box] if best else []
    return found


def spread_out(heights: Sequence[float]) -> list[float]:
    """Heights in pixels, moved down until lines of text at these heights do not overlap.

    Example:
        >>> spread_out([10.0, 50.0, 12.0])
        [10.0, 50.0, 24.0]
    """
    moved = list(heights)
    lowest = float("-inf")
    for rank in sorted(range(len(moved)), key=lambda n: heights[n]):
        moved[rank] = lowest = max(moved[rank], lowest + LINE)
    return moved


def _inside(place: LabelPlace, area: Box) -> bool:
    box = place.box
    return (
        area.left <= box.left
        and area.top <= box.top
        and box.right <= area.right
        and box.bottom <= area.bottom
    )


def _place(
    x: float, y: float, width: float, distance: float, sides: tuple[_Side, _Side]
) -> LabelPlace:
    side, level = sides
    dx, dy = side * distance, level * (distance + (LINE / 2 if side == 0 else 0))
    left = x + dx - {1: 0.0, 0: width / 2, -1: width}[side]
    box = Box(left, y + dy - LINE / 2, left + width, y + dy + LINE / 2)
    align: Literal["left", "center", "right"] = (
        "left" if side == 1 else "right" if side == -1 else "center"
    )
    return LabelPlace(dx, dy, align, box)
