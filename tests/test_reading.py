import hashlib
import os
from pathlib import Path

import pytest

from stateline.errors import InputError
from stateline.files import read_json, read_json_object, regular_file, sha256


def refused(path: Path, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_json_object(path, "recipe", max_bytes=100_000)
    assert "\n" not in str(caught.value)


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, "ä"]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json", "recipe") == {"a": [1, "ä"]}


def test_the_hash_is_that_of_the_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[" * 50_000, "nested too deeply"),
        (b"[1]", "must be a JSON object, got a list"),
        (b"9" * 6000, "is not JSON"),
        (b"[" + b"1," * 60_000, "must have at most 100,000 bytes, got 120,001"),
    ],
)
def test_damaged_json_is_refused_in_one_line(tmp_path: Path, contents: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(contents)
    refused(tmp_path / "a.json", message)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "good").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "good")
    refused(tmp_path / "fifo", "it is a pipe; give a regular file")
    refused(tmp_path, "it is a folder; give a regular file")
    refused(Path("/dev/zero"), "it is a device; give a regular file")
    refused(tmp_path / "loop", "symbolic links")
    refused(tmp_path / "nowhere", "cannot read the recipe .*: No such file or directory")
    refused(tmp_path / "good" / "below", "cannot read the recipe .*: Not a directory")
    refused(tmp_path / ("x" * 300), "File name too long")
    refused(tmp_path / "nul\0", "null")
    regular_file(tmp_path / "link", "recipe")
