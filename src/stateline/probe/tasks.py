"""The probes: what each asks for, how its examples are drawn, and how its answers are scored."""

import random
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

from stateline.errors import InputError
from stateline.probe import prompts
from stateline.probe.dictionary import VALUES, dictionary
from stateline.probe.material import Material
from stateline.probe.prompts import Entry, Example
from stateline.probe.scoring import exact_match, f1

Encode = Callable[[str], list[int]]
"""Gives the tokens of a text, without special tokens."""

Decode = Callable[[list[int]], str]
"""Gives the text of tokens."""

DOCUMENTS = 10
"""Random documents that are joined before a window is taken."""

TRIES = 100
"""Largest number of windows drawn to find two words: a copy of one word leaves nothing to write."""

_COPIED = (20, 50, 100, 200, 300)

NGRAM = 3
"""Letters of a key of ``ngram_lookup``, and of its answer."""

MOST = 1 << 25
"""Upper limit on the length of all examples together, so that a typo gives an error message."""

BIN = 50
"""Passages of SQuAD are binned by their length in tokens; this is the width of a bin."""


class Draw(NamedTuple):
    """The source of an example.

    Attributes:
        rng: Source of random choices.
        length: Length of the example, in the unit of its probe.
        material: Names, documents and questions.
        encode: Gives the tokens of a text, without special tokens.
        decode: Gives the text of tokens.
        passage_sizes: Gives the number of tokens of each passage.
    """

    rng: random.Random
    length: int
    material: Material
    encode: Encode
    decode: Decode
    passage_sizes: Callable[[], list[int]]


class Probe(NamedTuple):
    """A probe of what a model retrieves from its context.

    Attributes:
        title: Its name for readers.
        unit: What lengths count.
        data: The folder of the data that it needs; empty if it needs none.
        lengths: Lengths by default.
        make: Draws an example.
        stop: The answer ends before this string.
        new_tokens: Gives the largest number of tokens of an answer to a prompt of a length.
        normalise: Whether exact match ignores case, punctuation and articles.
        never_empty: Whether the first token of an answer must not be an end token.
        words: Words of an answer that count, which a model may continue; by default all.
        least: The smallest length.
        most: The largest length, if there is one.
    """

    title: str
    unit: str
    data: str
    lengths: tuple[int, ...]
    make: Callable[[Draw], Example]
    stop: str
    new_tokens: Callable[[int], int]
    normalise: bool = False
    never_empty: bool = False
    words: int | None = None
    least: int = 1
    most: int | None = None

    def score(self, example: Example, text: str) -> tuple[float, float]:
        """Exact match and F1 of the text that a model wrote after the prompt."""
        answer = prompts.one_line(text.split(self.stop)[0])
        if self.words is not None:
            answer = " ".join(answer.split()[: self.words])
        accepted = [prompts.one_line(text) for text in example.accepted]
        return exact_match(answer, accepted, normalise=self.normalise), f1(answer, accepted)


def make_examples(
    name: str,
    length: int,
    n: int,
    *,
    material: Material,
    encode: Encode,
    decode: Decode,
    seed: str = "0",
) -> Iterator[Example]:
    r"""Draw examples of a probe; the same arguments give the same examples.

    Args:
        name: A key of ``PROBES``.
        length: Length of each example, in the unit of the probe.
        n: Number of examples.
        material: Names, documents and questions.
        encode: Gives the tokens of a text, without special tokens.
        decode: Gives the text of tokens.
        seed: Seed of the random choices.

    Raises:
        InputError: If data is missing.
        NoExamples: If the data are too short for the length.

    Example:
        >>> encode, decode = lambda text: [*text.encode()], lambda ids: bytes(ids).decode()
        >>> data = Material(None)
        >>> [*make_examples("letters", 3, 1, material=data, encode=encode, decode=decode)]
        [Example(prompt='k f p\n\nk f p\n\nk', accepted=('f p',))]
    """

    @cache
    def sizes() -> list[int]:
        return [len(encode(passage.text)) for passage in material.passages]

    rng = random.Random(f"{seed}/{name}/{length}")
    draw = Draw(rng, length, material, encode, decode, sizes)
    return (PROBES[name].make(draw) for _ in range(n))


class NoExamples(InputError):
    """The data hold no example of a length, in the tokens of a model."""


def check_length(name: str, length: int, n: int) -> None:
    """Check, before a model is read, that ``n`` examples of a length can be drawn.

    Raises:
        InputError: If the length is out of range.
    """
    probe = PROBES[name]
    if length < probe.least:
        wanted = "positive" if probe.least == 1 else f"at least {probe.least} for {name}"
        raise InputError(f"lengths must be {wanted}, got {length}")
    if probe.most is not None and length > probe.most:
        raise InputError(f"lengths must be at most {probe.most} for {name}, got {length}")
    if length * n > MOST:
        raise InputError(
            f"{n:,} examples of {name} may have up to {MOST:,} {probe.unit} together, got {n:,} of "
            f"length {length:,}: lower the lengths or the number of examples"
        )


def _phone_book(draw: Draw) -> Example:
    rng = draw.rng
    female, male, last = draw.material.names
    entries = []
    for _ in range(draw.length):
        name = f"{rng.choice((female, male)).draw(rng)} {last.draw(rng)}"
        digits = "".join(rng.choices(string.digits, k=9))
        entries.append(Entry(name, f"{rng.randint(6, 9)}{digits}"))
    *shown, asked = rng.sample(entries, 3)
    return prompts.phone_book(entries, shown, asked)


def _copy(draw: Draw, *, shuffled: bool = False) -> Example:
    """A window of text that has at least two words."""
    for _ in range(TRIES):
        window = _window(draw)
        if shuffled:
            draw.rng.shuffle(window)
        text = prompts.one_line(draw.decode(window))
        if " " in text:
            return prompts.copy(text)
    raise NoExamples(f"no {draw.length} tokens of the text hold two words: raise the lengths")


def _window(draw: Draw) -> list[int]:
    """``length`` consecutive tokens of random documents, joined without a separator."""
    documents = draw.material.documents
    tokens = draw.encode("".join(draw.rng.choice(documents) for _ in range(DOCUMENTS)))
    if len(tokens) < draw.length:
        raise NoExamples(
            f"{DOCUMENTS} documents have {len(tokens)} tokens, fewer than the {draw.length} to "
            "copy: give longer texts or lower lengths"
        )
    start = draw.rng.randint(0, len(tokens) - draw.length)
    return tokens[start : start + draw.length]


def _letters(draw: Draw) -> Example:
    letters = draw.rng.choices(string.ascii_lowercase, k=draw.length)
    return prompts.copy(" ".join(letters))


def _ngram_lookup(draw: Draw) -> Example:
    """A string of which three n-grams occur once and are followed by as many letters."""
    for _ in range(TRIES):
        letters = draw.rng.choices(string.ascii_lowercase, k=draw.length)
        grams = [" ".join(letters[i : i + NGRAM]) for i in range(draw.length - NGRAM + 1)]
        count, followed = Counter(grams), zip(grams, grams[NGRAM:], strict=False)
        entries = [Entry(gram, more) for gram, more in followed if count[gram] == 1]
        if len(entries) >= 3:
            *shown, asked = draw.rng.sample(entries, 3)
            return prompts.lookup(" ".join(letters), shown, asked)
    raise NoExamples(f"fewer than three n-grams occur once in {draw.length} letters")


def _squad(draw: Draw) -> Example:
    low, high = draw.length - BIN, draw.length
    sizes = draw.passage_sizes()
    fit = [i for i, size in enumerate(sizes) if low < size <= high]
    if not fit:
        raise NoExamples(
            f"no passage has {max(low + 1, 1)} to {high} tokens: the {len(sizes)} passages have "
            f"{min(sizes)} to {max(sizes)}"
        )
    passage = draw.material.passages[draw.rng.choice(fit)]
    (shown, answers), asked = draw.rng.sample(passage.questions, 2)
    return prompts.question(passage.text, (shown, answers[0]), asked)


def _half_more(prompt_tokens: int) -> int:
    """Tokens up to 1.5 times the prompt and 50 more, as in the official code."""
    return int(1.5 * prompt_tokens) + 50 - prompt_tokens


PROBES: Mapping[str, Probe] = {
    "phone_book": Probe(
        "Phone book",
        *("entries", "names", (20, 50, 100, 150, 200), _phone_book, "\n"),
        new_tokens=lambda _: 50,
        least=3,
    ),
    "copy": Probe("Copy of text", "tokens", "text", _COPIED, _copy, "\n\n", _half_more),
    "shuffled_copy": Probe(
        "Copy of shuffled tokens",
        *("tokens", "text", _COPIED, partial(_copy, shuffled=True), "\n\n", _half_more),
    ),
    "letters": Probe(
        "Copy of letters",
        *("letters", "", _COPIED, _letters, "\n\n", _half_more),
        least=2,  # the prompt ends with the first one
    ),
    "ngram_lookup": Probe(
        "Lookup of n-grams",
        *("letters", "", _COPIED, _ngram_lookup, "\n"),
        new_tokens=lambda _: 3 * NGRAM,  # a letter and its space may be two tokens
        words=NGRAM,
        least=2 * NGRAM + 2,  # of which three are keys
    ),
    "dictionary": Probe(
        "Dictionary",
        *("pairs", "", (10, 20, 50), lambda draw: dictionary(draw.rng, draw.length), "\n"),
        new_tokens=lambda _: 8,
        normalise=True,  # a model may end its sentence with a full stop
        most=VALUES,
    ),
    "squad": Probe(
        "Questions on a passage",
        *("tokens of the passage", "qa", (100, 150, 200, 250, 300), _squad, "\n\n"),
        new_tokens=lambda _: 200,
        normalise=True,
        never_empty=True,
    ),
}
"""The probes of Repeat After Me, section 4, its lookup of n-grams, and a dictionary, by name."""
