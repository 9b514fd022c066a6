r"""The prompts of Repeat After Me, section 4, character for character, and their answers.

Source: Jelassi, Brandfonbrener, Kakade and Malach, "Repeat After Me", ICML 2024, section 4 and the
code published with it.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Example(NamedTuple):
    """A prompt, and the answers that are accepted."""

    prompt: str
    accepted: tuple[str, ...]

    @property
    def continuation(self) -> str:
        """The first accepted answer as it follows the prompt, after a space."""
        return self.accepted[0] if self.prompt.endswith(" ") else f" {self.accepted[0]}"


class Entry(NamedTuple):
    """A line of a phone book, or an n-gram and the letters that follow it."""

    name: str
    number: str

    def __str__(self) -> str:
        return f"{self.name}: {self.number}"


def phone_book(entries: Sequence[Entry], shown: Sequence[Entry], asked: Entry) -> Example:
    r"""A phone book, two entries of it as demonstrations, and a name whose number is asked for.

    Example:
        >>> book = [Entry("Ann Lee", "61"), Entry("Bo Ray", "72"), Entry("Cy Fox", "83")]
        >>> phone_book(book, book[:2], book[2]).prompt[-31:]
        'Ann Lee: 61\nBo Ray: 72\n\nCy Fox:'
    """
    return lookup("\n".join(map(str, entries)), shown, asked)


def lookup(text: str, shown: Sequence[Entry], asked: Entry) -> Example:
    r"""A text, names with what it says of them as demonstrations, and a name that is asked for.

    Example:
        >>> lookup("k f p q", [Entry("k", "f"), Entry("f", "p")], Entry("p", "q")).prompt
        'k f p q\n\nk: f\nf: p\n\np:'
    """
    demonstrations = "\n".join(map(str, shown))
    return Example(f"{text}\n\n{demonstrations}\n\n{asked.name}:", (asked.number,))


def copy(text: str) -> Example:
    r"""A text twice, and its first word; the answer is the rest of the text.

    The first word keeps a model from ending the text at once.

    Example:
        >>> copy("to be or")
        Example(prompt='to be or\n\nto be or\n\nto', accepted=('be or',))
    """
    first, _, rest = text.partition(" ")
    return Example(f"{text}\n\n{text}\n\n{first}", (rest,))


def question(passage: str, shown: tuple[str, str], asked: tuple[str, Sequence[str]]) -> Example:
    r"""A passage, a question with its answer as a demonstration, and a second question.

    Example:
        >>> question("It is hot.", ("Cold?", "no"), ("Hot?", ["yes"])).prompt
        'It is hot.\n\nQuestion: Cold?\nAnswer: no\n\nQuestion: Hot?\nAnswer: '
    """
    ask, accepted = asked
    demonstration = f"Question: {shown[0]}\nAnswer: {shown[1]}"
    prompt = f"{passage}\n\n{demonstration}\n\nQuestion: {ask}\nAnswer: "
    return Example(prompt, tuple(accepted))


def one_line(text: str) -> str:
    """The text with spaces for line breaks, without spaces at its ends."""
    return text.replace("\n", " ").strip()
