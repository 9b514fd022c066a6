"""Metrics of SuperGLUE for answers to questions, beside accuracy.

A measure computes a value from each question and the number of the chosen answer (``None`` if a
written text is none of the answers), and combines the values of all questions.

Reference:
    Wang et al., "SuperGLUE", 2019, section 3.
"""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple


class Measure(NamedTuple):
    """A score of a task.

    Attributes:
        name: Its name.
        value: Its value for a question and the number of the chosen answer.
        combine: The score, from the values of all questions.
    """

    name: str
    value: Callable[[Mapping[str, Any], int | None], Any]
    combine: Callable[[Sequence[Any]], float]


def word_f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 between two lists of words, counted with repetition; 0.0 without a common word.

    Example:
        >>> word_f1(["in", "1999"], ["1999"])
        0.6666666666666666
    """
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def class_f1(pairs: Sequence[tuple[int, int | None]], label: int) -> float:
    """F1 of one class: 2 TP / (2 TP + FP + FN), or 0.0 without a true positive.

    Example:
        >>> class_f1([(1, 1), (1, 0), (0, 1), (1, None)], 1)
        0.4
    """
    hits = sum(right == chosen == label for right, chosen in pairs)
    named = sum((right == label) + (chosen == label) for right, chosen in pairs)
    return 2 * hits / named if hits else 0.0


def _macro_f1(pairs: Sequence[tuple[int, int | None]]) -> float:
    """Mean F1 over the classes that are right or chosen in some pair."""
    labels = {label for pair in pairs for label in pair if label is not None}
    return fmean(class_f1(pairs, label) for label in sorted(labels))


def _all_right(pairs: Sequence[tuple[str, bool]]) -> float:
    """The share of groups in which every answer is right."""
    groups: dict[str, bool] = defaultdict(lambda: True)
    for group, right in pairs:
        groups[group] &= right
    return fmean(groups.values())


def _pair(row: Mapping[str, Any], chosen: int | None) -> tuple[int, int | None]:
    return row["right"][0], chosen


def _name_words(row: Mapping[str, Any], chosen: int | None) -> tuple[list[str], list[list[str]]]:
    """The words of the chosen name and of the right ones."""
    found = [] if chosen is None else _words(row["names"][chosen])
    return found, [_words(row["names"][number]) for number in row["right"]]


def _words(name: str) -> list[str]:
    """Words in lower case without articles and punctuation, as SQuAD compares them."""
    plain = name.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _name_f1(row: Mapping[str, Any], chosen: int | None) -> float:
    found, wanted = _name_words(row, chosen)
    return max(word_f1(found, words) for words in wanted)


def _name_match(row: Mapping[str, Any], chosen: int | None) -> float:
    found, wanted = _name_words(row, chosen)
    return float(chosen is not None and found in wanted)


MACRO_F1 = Measure("f1", _pair, _macro_f1)
"""CB: the unweighted mean of the F1 of the classes."""

ANSWER_F1 = Measure("f1a", _pair, lambda pairs: class_f1(pairs, 1))
"""MultiRC: F1 of the answers that are right, over all answers to all questions."""

QUESTION_MATCH = Measure(
    "em", lambda row, chosen: (row["group"], chosen in row["right"]), _all_right
)
"""MultiRC: the share of questions whose answers are all judged correctly."""

NAME_F1 = Measure("f1", _name_f1, fmean)
"""ReCoRD: F1 of the words of the chosen name, the best over the right names."""

NAME_MATCH = Measure("em", _name_match, fmean)
"""ReCoRD: the share of chosen names that equal a right one, without case and punctuation."""
