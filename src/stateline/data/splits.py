"""Splitting documents into three parts: for training, held out, and for the test."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from stateline.data.documents import Document
from stateline.errors import InputError
from stateline.files import read_json, user_path

SPLITS = ("train", "held_out", "test")
_NAMES = {"train": "train", "held_out": "held_out", "valid": "held_out", "test": "test"}

Splits = Mapping[str, Sequence[Document]]


def held_out_by_hash(names: Sequence[str], share: float, what: str = "names") -> list[int]:
    """Choose names to hold out by their hashes, so that new names do not move the old ones.

    Equal names are on one side. Each side gets at least one name, so the actual share differs if
    there are few.

    Args:
        names: At least two different ones.
        share: Expected share to hold out, between 0 and 1.
        what: What they are called in an error.

    Returns:
        Indices of the names to hold out, in the order of their hashes.

    Raises:
        InputError: If all names are equal.

    Example:
        >>> held_out_by_hash(["a", "b", "c", "d", "c"], 0.5)
        [3, 2, 4, 1]
    """
    hashes = {name: hashlib.sha256(os.fsencode(name)).digest() for name in names}
    if len(hashes) < 2:
        raise InputError(
            f"holding some out needs at least 2 different {what}, got {len(hashes)} in "
            f"{len(names):,}: add others"
        )
    count = sum(int.from_bytes(each[:8], "big") < share * 2**64 for each in hashes.values())
    last = sorted(hashes.values())[min(max(count, 1), len(hashes) - 1) - 1]
    chosen = [number for number, name in enumerate(names) if hashes[name] <= last]
    return sorted(chosen, key=lambda number: hashes[names[number]])


def split_by_hash(documents: Sequence[Document], share: float) -> Splits:
    """Hold out a share of the documents, chosen by the hash of their texts.

    So equal documents are on one side. At least one document is on either side. If there is one
    document, its last part is held out; with a share of 0, nothing is.

    Raises:
        InputError: If all documents are equal, or a single one is too short to be cut.
    """
    if share == 0:
        return {"train": documents}
    if len(documents) == 1:
        return _cut(documents[0], share)
    chosen = set(held_out_by_hash([document.sha256 for document in documents], share, "documents"))
    return {
        "train": [d for number, d in enumerate(documents) if number not in chosen],
        "held_out": [documents[number] for number in sorted(chosen)],
    }


def _cut(document: Document, share: float) -> Splits:
    """Cut a document in two, between two characters and not within a CR LF."""
    cut = document.size - max(2, int(document.size * share))
    while cut > 0 and _divides(document.read(cut - 1, cut + 1)):
        cut -= 1
    if cut < 1:
        raise InputError(
            f"{document.name} is too short to hold out a part of it, {document.size} bytes: give "
            "more text, or --held_out 0"
        )
    return {
        "train": [dataclasses.replace(document, end=cut)],
        "held_out": [dataclasses.replace(document, begin=cut)],
    }


def _divides(around: bytes) -> bool:
    """Whether a cut between two bytes divides a character or a CR LF."""
    return around[1] & 0xC0 == 0x80 or around == b"\r\n"


def split_by_bytes(documents: Sequence[Document], parts: Sequence[int]) -> Splits:
    """Cut a single document into consecutive parts of given sizes, in the order of ``SPLITS``.

    Raises:
        InputError: If there is more than one document, or the parts do not add up to it.
    """
    sizes = [document.size for document in documents[:2]]
    if len(sizes) != 1 or min(parts) < 2 or sum(parts) != sizes[0]:
        found = f"one of {sizes[0]:,} bytes" if len(sizes) == 1 else "more than one"
        raise InputError(
            f"parts must be at least 2 bytes each and add up to a single document, got {parts} and "
            f"{found}: correct them, or use held_out or splits"
        )
    ends = list(accumulate(parts))
    return {
        split: [dataclasses.replace(documents[0], begin=end - size, end=end)]
        for split, size, end in zip(SPLITS, parts, ends, strict=False)
    }


def split_by_names(documents: Sequence[Document], file: Path) -> Splits:
    """Split as a JSON file says: lists "train", "held_out" (or "valid") and optionally "test".

    A name is the end of a file's path; rows of one file stay together. Documents in no list are
    left out.

    Raises:
        InputError: If the file is not such an object, or a name does not name exactly one file.
    """
    split_of = _read_names(file)
    paths: dict[str, str] = {}  # by name
    splits: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for document in documents:
        parts = document.path.split("/")
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        named = [end for end in ends if end in split_of]
        if len({split_of[end] for end in named}) > 1:
            raise InputError(f"{file} names {document.path} in two splits: {' and '.join(named)}")
        for end in named:
            if paths.setdefault(end, document.path) != document.path:
                raise InputError(
                    f"{end!r} in {file} must name one file, but it names {paths[end]} and "
                    f"{document.path}: write more of the path"
                )
        if named:
            splits[split_of[named[0]]].append(document)
    for name in sorted(split_of.keys() - paths.keys()):
        raise InputError(f"{name!r} in {file} names none of the files: correct it or leave it out")
    return {split: chosen for split, chosen in splits.items() if chosen}


def _read_names(file: Path) -> dict[str, str]:
    """The split of each name."""
    lists = read_json(user_path(file, "file of splits"), "file of splits")
    if not (
        isinstance(lists, dict)
        and lists.keys() <= _NAMES.keys()
        and lists.get("train")
        and all(isinstance(names, list) for names in lists.values())
        and all(isinstance(name, str) for names in lists.values() for name in names)
    ):
        raise InputError(
            f'the splits {file} must be {{"train": [NAME, ...], "held_out": [...], "test": '
            '[...]} with at least one name in "train"; "valid" means "held_out"'
        )
    split_of: dict[str, str] = {}
    for key, names in lists.items():
        for name in names:
            if split_of.setdefault(name, _NAMES[key]) != _NAMES[key]:
                raise InputError(f"{file} has {name!r} in two splits: leave it in one")
    return split_of
