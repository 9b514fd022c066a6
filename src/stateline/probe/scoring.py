"""How an answer is scored: exact match, and F1 of words, against each of the accepted answers."""

import re
import string
from collections.abc import Sequence

from stateline.evaluate.harness.measures import word_f1

_PUNCTUATION = {*string.punctuation, "\u2018", "\u2019", "\u00b4"}
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalised(text: str) -> str:
    """The text in lower case, without punctuation, articles and extra spaces.

    A punctuation mark becomes a space, unlike in the official script of SQuAD, which removes it.

    Example:
        >>> normalised("The Cat_sat, on a mat!")
        'cat sat on mat'
    """
    spaced = "".join(" " if c in _PUNCTUATION else c for c in text.lower())
    return " ".join(_ARTICLES.sub(" ", spaced).split())


def exact_match(found: str, accepted: Sequence[str], *, normalise: bool) -> float:
    """1.0 if the answer equals an accepted one, else 0.0.

    Example:
        >>> exact_match("N.Y.C.", ["n y c"], normalise=True)
        1.0
        >>> exact_match("N.Y.C.", ["n y c"], normalise=False)
        0.0
    """
    if not normalise:
        return float(found in accepted)
    return float(normalised(found) in map(normalised, accepted))


def f1(found: str, accepted: Sequence[str]) -> float:
    """The largest F1 between the words of the answer and of an accepted answer.

    Words are counted with repetition, after :func:`normalised`. Without a common word it is 0.0,
    also if both are empty.

    Example:
        >>> f1("in 1999", ["1999", "In the year 1999"])
        0.8
    """
    words = normalised(found).split()
    return max(word_f1(words, normalised(text).split()) for text in accepted)
