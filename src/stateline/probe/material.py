"""Data for prompts: names, documents, and passages with questions, from a local folder."""

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from stateline.errors import InputError
from stateline.files import (
    parse_json_object,
    read_json_object,
    read_text,
    regular_file,
    sha256,
    user_path,
)

CENSUS = ("dist.female.first", "dist.male.first", "dist.all.last")
"""Files of the 1990 census of the United States: a name and its frequency per line."""

DOCUMENT = 2000
"""A document of a plain text file ends at the first blank line after this number of characters."""


class Names(NamedTuple):
    """Names with their frequencies."""

    names: list[str]
    weights: list[float]

    def draw(self, rng: Random) -> str:
        """A random name."""
        return rng.choices(self.names, self.weights)[0]


class Passage(NamedTuple):
    """A passage, and its questions with their accepted answers."""

    text: str
    questions: list[tuple[str, list[str]]]


class Material:
    """The files of a data folder, each read when it is first needed.

    ``names/`` holds the census files, ``text/`` documents (``.txt``, or ``.jsonl`` with a field
    ``text``), ``qa/`` questions in the format of SQuAD (``.json``). Folders are searched at any
    depth.

    Args:
        folder: The data folder; ``None`` if no probe needs one.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else user_path(folder, "data folder")
        self._hashes: dict[str, str] = {}

    @cached_property
    def names(self) -> tuple[Names, Names, Names]:
        """Female and male first names, and last names."""
        female, male, last = (_census(path) for path in self.files("names"))
        return female, male, last

    @cached_property
    def documents(self) -> list[str]:
        """Documents of running text."""
        found = [text for path in self.files("text") for text in _documents(path)]
        if not found:
            raise InputError(f"the files in {self._folder}/text hold no text: give others")
        return found

    @cached_property
    def passages(self) -> list[Passage]:
        """Passages that have at least two questions with answers."""
        found = [passage for path in self.files("qa") for passage in _passages(path)]
        usable = [passage for passage in found if len(passage.questions) > 1]
        if not usable:
            raise InputError(f"no passage in {self._folder}/qa has two questions with answers")
        return usable

    def read(self, kind: str) -> None:
        """Read the files of one kind now, so that a mistake in them is found before any work."""
        getattr(self, {"names": "names", "text": "documents", "qa": "passages"}[kind])

    def files(self, kind: str) -> list[Path]:
        """The files of one kind, ``names``, ``text`` or ``qa``, in order."""
        if self._folder is None:
            raise InputError(f"this probe needs data: give --data a folder that holds {kind}/")
        home = self._folder / kind
        if kind == "names":
            return [regular_file(home / name, "list of names") for name in CENSUS]
        endings = {"text": (".txt", ".jsonl"), "qa": (".json",)}[kind]
        found = sorted(path for path in home.rglob("*") if path.suffix in endings)
        if not found:
            raise InputError(f"there are no {' or '.join(endings)} files in {home}")
        return found

    def fingerprint(self, kind: str) -> str:
        """A hash of the files of one kind."""
        if kind not in self._hashes:
            hashes = [sha256(regular_file(path, "data file")) for path in self.files(kind)]
            self._hashes[kind] = " ".join(hashes)
        return self._hashes[kind]


def _census(path: Path) -> Names:
    rows = [line.split() for line in read_text(path, "list of names").splitlines() if line.strip()]
    try:
        names, weights = [row[0].capitalize() for row in rows], [float(row[1]) for row in rows]
    except (IndexError, ValueError) as error:
        raise InputError(
            f"each line of {path} must hold a name and its frequency: {error}"
        ) from error
    if not 0 < sum(weights) < math.inf or min(weights) < 0:
        raise InputError(f"the frequencies in {path} must not be negative, with a sum above 0")
    return Names(names, weights)


def _documents(path: Path) -> Iterator[str]:
    """Documents of a file: fields of JSON lines, or runs of paragraphs."""
    text = read_text(path, "text")
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield _field(parse_json_object(line, f"line {number} of {path}"), number, path)
        return
    document = ""
    for paragraph in text.split("\n\n"):
        document += f"{paragraph}\n\n"
        if len(document) >= DOCUMENT:
            yield document
            document = ""
    if document.strip():
        yield document


def _field(row: dict[str, Any], number: int, path: Path) -> str:
    found = row.get("text")
    if not isinstance(found, str):
        raise InputError(
            f"each line of {path} must be an object with a field text that is a string, got "
            f"{found!r:.40} in line {number}"
        )
    return found


def _passages(path: Path) -> Iterator[Passage]:
    described = read_json_object(path, "file of questions")
    try:
        for article in described["data"]:
            for paragraph in article["paragraphs"]:
                yield Passage(_string(paragraph["context"]), list(_questions(paragraph)))
    except (KeyError, TypeError) as error:
        raise InputError(f"the questions in {path} are not in SQuAD's format: {error}") from error


def _questions(paragraph: Any) -> Iterator[tuple[str, list[str]]]:
    """Questions that have an answer."""
    for asked in paragraph["qas"]:
        if accepted := [_string(answer["text"]) for answer in asked["answers"]]:
            yield _string(asked["question"]), accepted


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value
