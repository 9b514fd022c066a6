import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stateline.errors import InputError
from stateline.files import (
    PACKED,
    append_line,
    changed_file,
    check_writable,
    regular_file,
    sha256,
    text_file,
    write_atomically,
    write_folder,
    write_text,
)
from stateline.tasks import make_task

Limit = Callable[[int], AbstractContextManager[None]]


def test_text_is_written_with_the_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "text"
    write_text(path, "é\n")
    assert path.read_bytes() == "é\n".encode()


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for text in ("a longer old text", "new"):
        write_text(path, text)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_new_file_has_the_permissions_that_the_process_gives(
    tmp_path: Path, mask: int, mode: int
) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "text", "new")
        write_folder(tmp_path / "folder", lambda own: (own / "text").touch(0o600))
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    for name in ("text", "folder/text"):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode
    assert (tmp_path / "folder").stat().st_mode & 0o777 == mode | (mode & 0o444) >> 2


def test_a_reader_never_meets_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    write_text(path, "old")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        assert path.read_text() == "old"
        temporary.write_text("whole")

    write_atomically(path, write)
    assert path.read_text() == "whole"


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "text"
    write_text(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, full_disk: Limit) -> None:
    path = tmp_path / "text"
    write_text(path, "old")
    with full_disk(100), pytest.raises(InputError, match="File too large; choose another folder"):
        write_text(path, "new" * 100)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nowhere"])
def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / folder / "text"
    with pytest.raises(InputError, match=f"^cannot write {path}: .*; choose another folder$"):
        write_text(path, "new")


def test_lines_are_appended(tmp_path: Path) -> None:
    for line in ("first", "second"):
        append_line(tmp_path / "log", line)
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_line_that_finds_no_room_is_a_mistake_of_one_line() -> None:
    with pytest.raises(InputError, match=r"^cannot write /dev/full: No space left on device"):
        append_line(Path("/dev/full"), "line")


def test_a_line_does_not_wait_for_the_reader_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(InputError, match=r"^cannot write .*log: No such device or address"):
        append_line(tmp_path / "log", "line")


@pytest.mark.parametrize("write", [append_line, write_text])
def test_a_name_with_a_null_byte_is_one_line(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    with pytest.raises(InputError, match=r"^cannot write .*: embedded null byte; choose another"):
        write(tmp_path / "a\0b", "line")


def test_a_regular_file_is_found_through_links_and_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    assert regular_file(tmp_path / "link", "the file") == tmp_path / "link"
    assert regular_file("~/file", "the file") == tmp_path / "file"


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def test_a_file_of_another_size_is_not_hashed(tmp_path: Path) -> None:
    weights, record = tmp_path / "a.safetensors", tmp_path / "a.json"
    save_file({"a": np.ones(3)}, weights)
    record.write_text("{}")
    for path in (weights, record):
        assert not changed_file(tmp_path, {path.name: sha256(path)})
        assert changed_file(tmp_path, {path.name: sha256(path)[::-1]}) == path.name
        os.truncate(path, 1 << 40)  # a terabyte of zeros, without a block on the disk
        assert changed_file(tmp_path, {path.name: "any"}) == path.name


IRREGULAR: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda _: None, "No such file or directory"),
    "folder": (Path.mkdir, "it is a folder"),
    "pipe": (os.mkfifo, "it is a pipe"),
    "socket": (listen, "it is a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "broken": (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_what_is_no_regular_file_is_refused_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    make, reason = IRREGULAR[kind]
    make(Path(kind))
    with pytest.raises(InputError) as caught:
        regular_file(kind, "file")
    assert (
        str(caught.value)
        == f"cannot read the file {kind}: {reason}; give a regular file that can be read"
    )


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("a" * 300, "File name too long"),
        ("a\0b", "embedded null byte"),
        ("~nobody-of-this-name/file", "Could not determine home directory"),
        ("", "it is a folder"),
    ],
    ids=["long", "null", "home", "empty"],
)
def test_a_name_that_no_file_can_have_is_one_line(path: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        regular_file(path, "the file")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    with pytest.raises(InputError, match=r"secret: Permission denied; give a regular file"):
        regular_file(tmp_path / "secret", "the file")


@pytest.mark.parametrize("name", ["new", "new/below/far", "file"])
def test_a_check_for_writing_leaves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize(
    "name",
    ["folder", "file/below", "broken/file", "loop/file", "a" * 250, f"new/{'a' * 300}/b", "a\0b"],
)
def test_what_cannot_be_written_is_found_before(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"^cannot write .*; choose another folder$"):
        check_writable(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("ending", PACKED)
def test_a_packed_file_is_no_text(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"book.jsonl{ending}"
    path.write_bytes(b"text")
    message = f"book.jsonl{ending} is packed, so its bytes are no text: unpack it first"
    with pytest.raises(InputError, match=message):
        text_file(path, "text")
    with pytest.raises(InputError, match=message):
        make_task(f"text(path={path})")
