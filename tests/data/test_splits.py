import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stateline.data.documents import FileDocument
from stateline.data.splits import (
    Splits,
    held_out_by_hash,
    split_by_bytes,
    split_by_hash,
    split_by_names,
)
from stateline.errors import InputError


def documents(*names: str, folder: str = "/data/books") -> list[FileDocument]:
    return [FileDocument(name=name, path=f"{folder}/{name}", size=9, sha256=name) for name in names]


def names(splits: Splits) -> dict[str, list[str]]:
    return {split: [document.name for document in chosen] for split, chosen in splits.items()}


@given(count=st.integers(2, 60), share=st.floats(0.001, 0.999))
def test_every_document_is_on_one_side_and_no_side_is_empty(count: int, share: float) -> None:
    given_names = [f"{number}.txt" for number in range(count)]
    found = names(split_by_hash(documents(*given_names), share))
    assert min(len(found["train"]), len(found["held_out"])) >= 1
    assert sorted(found["train"] + found["held_out"]) == sorted(given_names)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_share_is_about_what_was_asked_for(share: float) -> None:
    splits = split_by_hash(documents(*map(str, range(2000))), share)
    assert 0.8 * share < len(splits["held_out"]) / 2000 < 1.2 * share


def test_a_new_document_leaves_the_others_on_their_side() -> None:
    before, after = (split_by_hash(documents(*map(str, range(n))), 0.2) for n in (100, 101))
    assert set(names(after)["held_out"]) - {"100"} == set(names(before)["held_out"])


@given(numbers=st.lists(st.integers(0, 4), min_size=2), share=st.floats(0.001, 0.999))
def test_equal_names_are_on_one_side(numbers: list[int], share: float) -> None:
    assume(len(set(numbers)) > 1)
    given_names = [str(number) for number in numbers]
    held_out = set(held_out_by_hash(given_names, share))
    sides = [{n for i, n in enumerate(given_names) if (i in held_out) == side} for side in (0, 1)]
    assert all(sides)
    assert not set.intersection(*sides)


def test_equal_names_alone_are_refused() -> None:
    with pytest.raises(InputError, match="at least 2 different names, got 1 in 3: add others"):
        held_out_by_hash(["a", "a", "a"], 0.1)


def test_equal_documents_are_on_one_side() -> None:
    """Their names do not matter."""
    texts = [str(number % 20) for number in range(200)]
    rows = [
        FileDocument(name=f"a:{row}", path="/data/a.jsonl", size=1, sha256=text)
        for row, text in enumerate(texts)
    ]
    splits = split_by_hash(rows, 0.3)
    sides = [{document.sha256 for document in documents} for documents in splits.values()]
    assert sum(map(len, sides)) == 20
    with pytest.raises(InputError, match="2 different documents, got 1 in 10"):
        split_by_hash(rows[::20], 0.3)


def test_nothing_is_held_out_of_a_share_of_nothing() -> None:
    assert names(split_by_hash(documents("a", "b"), 0.0)) == {"train": ["a", "b"]}


@given(text=st.text(alphabet="aé😀\r\n", min_size=12), share=st.floats(0.1, 0.5))
def test_of_a_single_document_the_last_part_is_held_out(
    tmp_path_factory: pytest.TempPathFactory, text: str, share: float
) -> None:
    path = tmp_path_factory.mktemp("single") / "a"
    path.write_bytes(text.encode())
    only = FileDocument(name="a", path=str(path), size=len(text.encode()), sha256="")
    splits = split_by_hash([only], share)
    parts = ["".join(splits[split][0].pieces("keep")) for split in ("train", "held_out")]
    assert "".join(parts) == text
    assert len(parts[1].encode()) >= share * only.size - 1
    unified = "".join("".join(splits[split][0].pieces("unify")) for split in ("train", "held_out"))
    assert unified == text.replace("\r\n", "\n")


def test_a_document_that_is_too_short_to_be_cut_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    with pytest.raises(InputError, match="a is too short to hold out a part of it, 2 bytes"):
        split_by_hash([FileDocument(name="a", path=str(tmp_path / "a"), size=2, sha256="")], 0.1)


def split_file(tmp_path: Path, contents: object) -> Path:
    path = tmp_path / "splits.json"
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return path


@pytest.mark.parametrize("key", ["valid", "held_out"])
def test_names_are_ends_of_paths_and_what_is_not_named_is_left_out(
    tmp_path: Path, key: str
) -> None:
    lists = {"train": ["books/b", "c"], key: ["a"], "test": ["data/books/e"]}
    splits = split_by_names(documents(*"abcde"), split_file(tmp_path, lists))
    assert names(splits) == {"train": ["b", "c"], "held_out": ["a"], "test": ["e"]}


def test_a_name_is_not_the_end_of_a_file_name(tmp_path: Path) -> None:
    file = split_file(tmp_path, {"train": ["a"], "test": ["b"]})
    assert names(split_by_names(documents("a", "xa", "b"), file))["train"] == ["a"]


def test_the_rows_of_a_file_go_together(tmp_path: Path) -> None:
    rows = [
        FileDocument(name=f"a:{row}", path="/data/a.jsonl", size=1, sha256="") for row in range(3)
    ]
    splits = split_by_names(rows, split_file(tmp_path, {"train": ["a.jsonl"]}))
    assert names(splits) == {"train": ["a:0", "a:1", "a:2"]}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "is not JSON"),
        ([], "must be .*at least one name in"),
        ({"test": ["a"]}, "at least one name in"),
        ({"train": ["a"], "dev": ["b"]}, "must be "),
        ({"train": "a"}, "must be "),
        ({"train": [1]}, "must be "),
        ({"train": ["a"], "valid": ["a"]}, "has 'a' in two splits"),
        ({"train": ["a"], "valid": ["books/a"]}, "names /data/books/a in two splits: books/a and"),
        ({"train": ["a", "z"]}, "'z' in .* names none of the files"),
        ({"train": ["c"]}, "'c' in .* must name one file, but it names /data/books/c and /other/c"),
    ],
)
def test_splits_that_cannot_be_used_are_one_line(
    tmp_path: Path, contents: object, message: str
) -> None:
    both = documents("a", "c") + documents("c", folder="/other")
    with pytest.raises(InputError, match=message) as caught:
        split_by_names(both, split_file(tmp_path, contents))
    assert "\n" not in str(caught.value)


def test_a_missing_file_of_splits_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"cannot read the file of splits .*nowhere.json: No such file"
    ):
        split_by_names(documents("a"), tmp_path / "nowhere.json")


def test_a_document_is_cut_at_given_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    only = FileDocument(name="a", path=str(tmp_path / "a"), size=10, sha256="")
    splits = split_by_bytes([only], [6, 2, 2])
    found = {
        split: "".join("".join(d.pieces("keep")) for d in chosen)
        for split, chosen in splits.items()
    }
    assert found == {"train": "012345", "held_out": "67", "test": "89"}
    for documents_, parts in (([only], [6, 3]), ([only] * 2, [6, 4]), ([only], [9, 1])):
        with pytest.raises(InputError, match="add up to a single document"):
            split_by_bytes(documents_, parts)
