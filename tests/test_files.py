from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from stateline.errors import InputError
from stateline.files import append_line, write_atomically, write_text

Limit = Callable[[int], AbstractContextManager[None]]


def test_text_is_written_with_the_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "text"
    write_text(path, "é\n")
    assert path.read_bytes() == "é\n".encode()


def test_a_file_is_replaced_and_readable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for text in ("a longer old text", "new"):
        write_text(path, text)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


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
