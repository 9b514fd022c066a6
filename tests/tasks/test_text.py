import random
import string
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import IGNORE, Text


def write(folder: Path, files: dict[str, bytes]) -> str:
    for name, contents in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents)
    return str(folder)


@pytest.fixture
def letters(tmp_path: Path) -> str:
    """A folder of 52 files, each of one letter 100 times over."""
    return write(tmp_path, {f"{x}/file": x.encode() * 100 for x in string.ascii_letters})


def trained_bytes(task: Text, n_batches: int = 200) -> set[int]:
    return {
        byte
        for index in range(n_batches)
        for byte in task.train_batch(index).tokens.unique().tolist()
    }


def scored_bytes(task: Text) -> set[int]:
    return {byte for batch in task.held_out(50) for byte in batch.targets.unique().tolist()} - {
        IGNORE
    }


def test_training_never_sees_a_held_out_file(letters: str) -> None:
    task = Text(path=letters, length=20)
    assert not trained_bytes(task) & scored_bytes(task)


def test_training_sees_every_file_that_is_not_held_out(letters: str) -> None:
    task = Text(path=letters, length=20)
    assert len(trained_bytes(task) | scored_bytes(task)) == 52


def test_about_one_file_in_ten_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path, {f"{number}.txt": b"text" for number in range(1000)})
    assert 70 < len(Text(path=path, length=8).describe()["held_out_files"]) < 130


def test_a_new_file_leaves_the_others_on_their_side(letters: str) -> None:
    before = set(Text(path=letters).describe()["held_out_files"])
    write(Path(letters), {"new": b"new" * 100})
    assert set(Text(path=letters).describe()["held_out_files"]) - {"new"} == before


@pytest.mark.parametrize("side", ["held out", "trained on"])
def test_both_sides_have_a_file_even_if_all_belong_to_one(tmp_path: Path, side: str) -> None:
    path = write(tmp_path / "all", {f"{number}.txt": b"some text" for number in range(100)})
    whole = Text(path=path, length=8).describe()
    held_out = set(whole["held_out_files"])
    names = held_out if side == "held out" else set(whole["files"]) - held_out
    task = Text(path=write(tmp_path / "part", dict.fromkeys(names, b"some text")), length=8)
    assert 1 <= len(task.describe()["held_out_files"]) < len(names)


def test_of_a_single_file_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    task = Text(path=write(tmp_path, {"a": b"x" * 900 + b"y" * 100}) + "/a", length=50)
    assert (trained_bytes(task), scored_bytes(task)) == ({ord("x")}, {ord("y")})


def test_the_cap_cuts_the_held_out_text_and_leaves_the_training_text(letters: str) -> None:
    capped, whole = (Text(path=letters, held_out_bytes=most).describe() for most in (150, 10**6))
    assert capped["held_out_bytes"] == 150
    assert len(capped["held_out_files"]) == 2
    assert capped["training_bytes"] == whole["training_bytes"]


@given(size=st.integers(30, 3000), length=st.integers(1, 400), seed=st.integers(0, 99))
def test_every_held_out_byte_but_the_first_is_a_target_once(
    tmp_path_factory: pytest.TempPathFactory, size: int, length: int, seed: int
) -> None:
    contents = random.Random(seed).randbytes(size)
    path = tmp_path_factory.mktemp("text") / "file"
    path.write_bytes(contents)
    task = Text(path=str(path), length=4)
    tokens, targets = (
        torch.cat(parts).flatten() for parts in zip(*task.held_out(length), strict=True)
    )
    held_out = contents[-max(2, size // 10) :]
    assert bytes(targets[targets != IGNORE].tolist()) == held_out[1:]
    assert bytes(tokens[targets != IGNORE].tolist()) == held_out[:-1]


def test_held_out_batches_are_of_about_16000_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": bytes(range(1, 251)) * 2400})
    batches = list(Text(path=path).held_out(100))
    assert [batch.tokens.shape for batch in batches[:-1]] == [(163, 100)] * (len(batches) - 1)
    assert sum(len(batch.tokens) for batch in batches) == 600


def test_training_windows_reach_both_ends_of_the_text(tmp_path: Path) -> None:
    contents = bytes(range(1, 55)) + b"6 more"
    task = Text(path=write(tmp_path, {"a": contents}) + "/a", length=40)
    batches = [task.train_batch(index) for index in range(50)]
    assert {row[0] for batch in batches for row in batch.tokens.tolist()} == set(range(1, 15))
    assert {row[-1] for batch in batches for row in batch.targets.tolist()} == set(range(41, 55))


def test_the_order_in_which_files_are_written_does_not_matter(tmp_path: Path) -> None:
    files = {f"{number // 4}/{number}": b"text %d" % number for number in range(20)}
    forward = Text(path=write(tmp_path / "a", files), length=4)
    backward = Text(path=write(tmp_path / "b", dict(reversed(files.items()))), length=4)
    assert {**forward.describe(), "source": ""} == {**backward.describe(), "source": ""}
    assert forward.train_batch(0).tokens.equal(backward.train_batch(0).tokens)


@pytest.mark.parametrize("change", [{"a": b"other text"}, {"c": b"text"}])
def test_the_hash_tells_any_change(tmp_path: Path, change: dict[str, bytes]) -> None:
    path = write(tmp_path, {"a": b"first text", "b": b"second text"})
    before = Text(path=path, length=4).describe()["sha256"]
    assert Text(path=write(tmp_path, change), length=4).describe()["sha256"] != before


def test_the_hash_tells_a_new_name(tmp_path: Path) -> None:
    paths = [write(tmp_path / x, {x: b"text" * 9}) for x in "ab"]
    assert len({Text(path=path, length=4).describe()["sha256"] for path in paths}) == 2


def test_hidden_empty_and_binary_files_are_passed_over(tmp_path: Path) -> None:
    passed_over = {".git/config": b"text", "a/.hidden": b"text", "empty": b"", "image": b"GIF\0 8"}
    path = write(tmp_path, {"a/b": b"text" * 9, "c": b"text" * 9} | passed_over)
    assert Text(path=path, length=4).describe()["files"] == ("a/b", "c")


def test_random_bytes_cannot_be_packed(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": random.Random(0).randbytes(100_000)}) + "/a"
    assert all(8 <= bits < 8.2 for bits in Text(path=path).baselines().values())


def test_baselines_see_the_held_out_text_alone(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": random.Random(0).randbytes(90_000) + b"y" * 10_000}) + "/a"
    baselines = Text(path=path).baselines()
    assert set(baselines) == {"gzip", "xz"}
    assert all(bits < 0.2 for bits in baselines.values())


def test_the_default_is_the_library_of_the_running_python_without_its_tests() -> None:
    description = Text().describe()
    files = description["files"]
    assert {"argparse.py", "json/decoder.py"} < set(files)
    assert not any(part in name.split("/") for name in files for part in ("test", "site-packages"))
    assert description["held_out_bytes"] == 262_144


def test_the_library_packs_to_one_to_three_bits_per_byte() -> None:
    baselines = Text().baselines()
    assert 1 < baselines["xz"] < baselines["gzip"] < 3


def test_real_prose_packs_to_two_to_four_bits_per_byte(data: Path) -> None:
    text = max((data / "text").rglob("*.txt"), key=lambda path: path.stat().st_size)
    assert all(2 < bits < 4 for bits in Text(path=str(text)).baselines().values())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"length": 0}, "wants length to be int of at least 1, got 0"),
        ({"batch_size": 0}, "wants batch_size to be"),
        ({"held_out_bytes": 1}, "wants held_out_bytes to be int of at least 2, got 1"),
        ({"length": 30}, "must give 31 bytes in a row .* got 18 and 2: give more text"),
    ],
)
def test_impossible_sizes_are_refused(
    tmp_path: Path, keywords: dict[str, int], message: str
) -> None:
    path = write(tmp_path, {"a": b"twenty bytes of text"})
    with pytest.raises(InputError, match=message):
        Text(path=path, **keywords)


def test_a_missing_path_is_refused() -> None:
    with pytest.raises(InputError, match="got 'no/such/file', which does not exist"):
        Text(path="no/such/file")


@pytest.mark.parametrize("files", [{}, {"a": b""}, {"a": b"\0binary"}])
def test_a_folder_without_text_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(InputError, match=f"found no text in {tmp_path}"):
        Text(path=write(tmp_path, files))


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    path = write(tmp_path, {"a": b"text"})
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"cannot read '.*/a' .*: Permission denied"):
        Text(path=path)


def test_a_window_of_no_bytes_is_refused(letters: str) -> None:
    with pytest.raises(InputError, match="got length=0"):
        Text(path=letters).held_out(0)
