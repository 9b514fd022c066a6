import codecs
import dataclasses
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stateline.data.sources import Sources, read_sources
from stateline.errors import InputError

Write = Callable[..., Path]


def read(*paths: Path, text_key: str = "text", split_name: str = "train") -> Sources:
    return read_sources(paths, text_key, split_name)


def texts(*paths: Path, **keys: str) -> dict[str, str]:
    return {
        document.name: "".join(document.pieces("unify"))
        for document in read(*paths, **keys).documents
    }


def test_a_file_is_a_document(write: Write) -> None:
    root = write("books", **{"a.txt": "alpha"})
    assert texts(root / "a.txt") == {"a.txt": "alpha"}


def test_a_folder_is_read_to_its_depths_in_order(write: Write) -> None:
    root = write("books", **{"b": "beta", "a/c": "gamma", "a/b/d": "delta"})
    assert list(texts(root).items()) == [
        ("books/a/b/d", "delta"),
        ("books/a/c", "gamma"),
        ("books/b", "beta"),
    ]


def test_hidden_empty_and_binary_files_of_a_folder_are_passed_over(write: Write) -> None:
    passed_over = {".git/config": "text", "d/.hidden": "text", "empty": "", "image": b"GIF\0 8"}
    assert texts(write("books", a="alpha", **passed_over)) == {"books/a": "alpha"}


def test_a_file_that_is_named_is_read_whatever_is_in_it(write: Write) -> None:
    assert texts(write("books", a=b"\0\xff") / "a") == {"a": "\0\udcff"}


def test_a_character_that_is_cut_at_the_end_of_a_file_is_kept(write: Write) -> None:
    assert texts(write("books", a=b"ab\xf0\x9f")) == {"books/a": "ab\udcf0\udc9f"}


def test_a_file_with_nothing_but_a_byte_order_mark_is_empty(write: Write) -> None:
    root = write("books", a="alpha", mark=codecs.BOM_UTF8)
    assert texts(root) == {"books/a": "alpha"}
    with pytest.raises(InputError, match=r"found no text in .*mark"):
        texts(root / "mark")


def test_a_line_of_json_is_a_document(write: Write) -> None:
    lines = [json.dumps({"text": text, "id": 1}) for text in ("one é", "", "three 😀")]
    root = write("rows", **{"a.jsonl": "\n".join([*lines[:2], "", lines[2]])})
    assert texts(root / "a.jsonl") == {"a.jsonl:1": "one é", "a.jsonl:4": "three 😀"}


def test_a_part_of_a_line_of_json_and_half_a_pair_of_surrogates_are_read(write: Write) -> None:
    (document,) = read(write("rows", **{"a.jsonl": r'{"text": "ab\ud800cd"}'})).documents
    assert "".join(document.pieces("unify")) == "ab\udced\udca0\udc80cd"
    part = dataclasses.replace(document, begin=1, end=6)
    assert "".join(part.pieces("unify")) == "b\udced\udca0\udc80c"


def test_the_field_of_the_text_may_be_chosen(write: Write) -> None:
    root = write("rows", **{"a.jsonl": '{"text": "no", "body": "yes"}\n'})
    assert texts(root / "a.jsonl", text_key="body") == {"a.jsonl:1": "yes"}


def test_lines_and_rows_of_packed_files_are_documents(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    wanted = [f"{number} é" if number != 2 else "" for number in range(5)]
    lines = "\n".join(json.dumps({"text": text or None}) for text in wanted)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pa.table({"id": [*range(5)], "text": [text or None for text in wanted]})
    parquet.write_table(table, tmp_path / "rows/b.parquet", row_group_size=2)
    numbers = [0, 1, 3, 4]
    packed = {f"a.jsonl.gz:{number + 1}": wanted[number] for number in numbers}
    columns = {f"b.parquet:{number}": wanted[number] for number in numbers}
    assert texts(tmp_path / "rows/a.jsonl.gz") == packed
    assert texts(tmp_path / "rows/b.parquet") == columns
    both = read(tmp_path / "rows").documents
    for document in reversed(both):  # in any order
        name = document.name.removeprefix("rows/")
        assert "".join(document.pieces("unify")) == {**packed, **columns}[name]
    with pytest.raises(InputError, match="but it has 'id', 'text': name the field of the text"):
        read(tmp_path / "rows/b.parquet", text_key="body")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut", "changed", "other"])
def test_a_damaged_packed_file_is_one_line(tmp_path: Path, name: str, damage: str) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pa.table({"text": ["one", "two"] * 99}), path)
    else:
        path.write_bytes(gzip.compress(b'{"text": "one"}\n' * 99))
    whole = path.read_bytes()
    damaged = {"cut": whole[:-9], "changed": whole[:10] + b"\xff" * 9 + whole[19:], "other": b"no"}
    path.write_bytes(damaged[damage])
    with pytest.raises(InputError, match=r"cannot read the source|is damaged") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """A folder with a data set ``one`` and a dictionary of two ``several``."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one é", "", "three"], "id": [1, 2, 3]})
    rows.save_to_disk(tmp_path / "one")
    both = {"train": rows, "test": rows.select([2])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "several")
    capfd.readouterr()
    return tmp_path


def test_a_row_of_a_saved_data_set_is_a_document(saved: Path) -> None:
    assert texts(saved / "one") == {"one:0": "one é", "one:2": "three"}


@pytest.mark.parametrize(("split", "count"), [("train", 2), ("test", 1)])
def test_of_several_data_sets_one_is_chosen(saved: Path, split: str, count: int) -> None:
    found = texts(saved / "several", split_name=split)
    assert len(found) == count
    assert all(name.startswith(f"several/{split}:") for name in found)


def test_an_unknown_split_is_named_with_those_that_there_are(saved: Path) -> None:
    with pytest.raises(InputError, match="has no split 'dev', it has test, train: name one with"):
        read(saved / "several", split_name="dev")


def test_rows_without_text_are_refused(saved: Path) -> None:
    with pytest.raises(InputError, match=r"row 0, must have text in the field 'id', but it has "):
        read(saved / "one", text_key="id")


def test_a_damaged_data_set_is_refused(saved: Path) -> None:
    (arrow,) = (saved / "one").glob("*.arrow")
    arrow.write_bytes(b"broken")
    with pytest.raises(InputError, match=r"the data set .*/one is damaged: ") as caught:
        read(saved / "one")
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'stateline\[data\]'"):
        read(saved / "one")


def test_the_hash_of_a_file_tells_any_change(write: Write) -> None:
    hashes = [read(write("books", a=text, b="same")).files for text in ("one", "two")]
    assert hashes[0][0] != hashes[1][0]
    assert hashes[0][1] == hashes[1][1]


@pytest.mark.parametrize(
    ("text", "newlines", "wanted"),
    [
        ("\ufeffa\r\nb\n\rc\r\n", "unify", "a\nb\n\rc\n"),
        ("\ufeffa\r\nb", "keep", "\ufeffa\r\nb"),
        ("a\ufeff", "unify", "a\ufeff"),
        ("a\r", "unify", "a\r"),
    ],
)
@pytest.mark.parametrize("piece", [1, 1000])
def test_newlines_are_made_one_unless_told(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    newlines: str,
    wanted: str,
    piece: int,
) -> None:
    monkeypatch.setattr("stateline.data.documents.FileDocument.piece_bytes", piece)
    (document,) = read(write("books", a=text)).documents
    assert "".join(document.pieces(newlines)) == wanted


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nowhere"], "cannot read the source .*/nowhere: No such file or directory"),
        (["empty"], "found no text in .*/empty: give a path"),
        (["files", "files/a"], "files/a is given twice"),
        (["files/a", "files/a"], "files/a is given twice"),
        (["json/text.gz"], "text.gz is packed, so its bytes are no text: unpack it"),
        (["json/broken.jsonl"], "broken.jsonl, line 2, is not JSON: "),
        (["json/list.jsonl"], "line 1, must have text in the field 'text', but it has no fields: "),
        (["json/other.jsonl"], "but it has 'body', 'id': name the field of the text with --text"),
    ],
)
def test_a_source_that_cannot_be_used_is_one_line(
    write: Write, tmp_path: Path, names: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    write("files", a="alpha")
    broken, rows = '{"text": "a"}\n{"text": \n', '{"body": "a", "id": 3}'
    lines = {"broken.jsonl": broken, "list.jsonl": "[1]", "other.jsonl": rows}
    write("json", **lines, **{"text.gz": b"\x1f\x8b"})
    with pytest.raises(InputError, match=message) as caught:
        read(*(tmp_path / name for name in names))
    assert "\n" not in str(caught.value)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    paths = [tmp_path / "pipe", Path("/dev/zero"), tmp_path / "loop", tmp_path / ("x" * 300)]
    for path in [*paths, Path("~nobody-has-this-name/text"), tmp_path / "a\0b"]:
        with pytest.raises(InputError, match="source") as caught:
            read_sources([path], "text", "train")
        assert "\n" not in str(caught.value)
