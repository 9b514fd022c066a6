"""Writing a corpus: what is in it, and that nothing but the sources and the recipe decides that."""

import gzip
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing import active_children
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

from stateline.data import Corpus, CorpusSettings, Progress, open_corpus, write_corpus
from stateline.data.index import TokenHash
from stateline.data.load import load_tokenizer
from stateline.errors import InputError
from stateline.tasks import Tokens

Write = Callable[..., Path]

PATIENT = """
import sys
from stateline.data import CorpusSettings, write_corpus

def tell(progress):
    print(progress.done, flush=True)
    sys.stdin.readline()

if __name__ == "__main__":
    source, out, workers = sys.argv[1:]
    settings = CorpusSettings(shard_tokens=300)
    write_corpus([source], out, settings, workers=int(workers), progress=tell)
"""


@pytest.fixture
def source(write: Write) -> Path:
    """Forty documents of about 100 to 500 bytes, some with characters of several bytes."""
    drawn = random.Random(0)
    words = ["the", "naïve", "quick", "日本", "fox", "jumps\r\n", "over"]
    texts = [" ".join(drawn.choices(words, k=drawn.randint(20, 100))) for _ in range(40)]
    return write("source", **{f"{number:02}.txt": text for number, text in enumerate(texts)})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make(source: Path, out: Path, **settings: Any) -> Corpus:
    return write_corpus(
        [source], out, CorpusSettings(**{"shard_tokens": 300, **settings}), workers=1
    )


def texts(corpus: Corpus, split: str) -> dict[str, str]:
    """The text of each document, decoded from its tokens."""
    part = corpus.splits[split]
    borders = part.text.borders.tolist()
    places = zip(part.names, borders[:-1], borders[1:], strict=True)
    return {name: corpus.tokenizer.decode(part.text.read(a, b)) for name, a, b in places}


@pytest.mark.parametrize("kind", ["byte", "character", "bpe"])
def test_the_documents_come_back_from_their_tokens(
    source: Path, tmp_path: Path, bpe: Path, kind: str
) -> None:
    corpus = make(source, tmp_path / "out", tokenizer=str(bpe) if kind == "bpe" else kind)
    found = texts(corpus, "train") | texts(corpus, "held_out")
    wanted = {path.name: path.read_bytes().decode() for path in source.iterdir()}
    assert found == {f"source/{name}": text.replace("\r\n", "\n") for name, text in wanted.items()}


def test_bytes_of_documents_are_those_of_their_text(source: Path, tmp_path: Path) -> None:
    corpus = make(source, tmp_path / "out", tokenizer="character")
    for name, split in corpus.splits.items():
        assert split.bytes.tolist() == [len(text.encode()) for text in texts(corpus, name).values()]


def test_shards_are_of_about_the_size_that_was_asked_for(source: Path, tmp_path: Path) -> None:
    corpus = make(source, tmp_path / "out", shard_tokens=1500)
    *full, last = [shard["tokens"] for shard in corpus.index["splits"]["train"]]
    assert len(full) > 3
    assert all(1450 <= size < 2200 for size in full)
    assert last < 2200


@pytest.mark.parametrize(("size", "dtype"), [(256, "|u1"), (257, "<u2"), (65537, "<u4")])
def test_numbers_are_as_wide_as_the_vocabulary_needs(
    tmp_path: Path, write: Write, size: int, dtype: str
) -> None:
    characters = "".join(map(chr, range(0x10000, 0x10000 + size)))
    source = write("source", a=characters)
    corpus = make(source, tmp_path / "o", tokenizer="character", held_out=0.0)
    assert corpus.index["dtype"] == dtype
    raw = np.fromfile(tmp_path / "o" / "train-00000.bin", dtype)
    assert raw.tolist() == list(range(size))


def test_a_corpus_does_not_depend_on_the_number_of_workers(source: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        write_corpus(
            [source], tmp_path / str(workers), CorpusSettings(shard_tokens=3000), workers=workers
        ).verify()
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert active_children() == []


def test_a_corpus_does_not_depend_on_where_its_sources_lie(source: Path, tmp_path: Path) -> None:
    first = contents(make(source, tmp_path / "out").folder)
    (tmp_path / "elsewhere").mkdir()
    moved = source.rename(tmp_path / "elsewhere" / "source")
    assert contents(make(moved, tmp_path / "again").folder) == first


def test_progress_is_told_from_nothing_to_all(source: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    corpus = write_corpus([source], tmp_path / "out", workers=1, progress=told.append)
    assert [news.done for news in told] == list(range(told[0].shards + 1))
    assert told[-1].tokens == sum(len(split.text) for split in corpus.splits.values())


@pytest.mark.parametrize(("workers", "kills"), [(1, 3), (2, 1)])
@pytest.mark.slow
def test_a_corpus_that_is_killed_goes_on_to_the_same_bytes(
    source: Path, tmp_path: Path, workers: int, kills: int
) -> None:
    make(source, tmp_path / "whole")
    script, out = tmp_path / "patient.py", tmp_path / "out"
    script.write_text(PATIENT)
    command = [sys.executable, str(script), str(source), str(out), str(workers)]
    drawn = random.Random(workers)
    for steps in drawn.sample(range(3, 10), kills):
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
            assert process.stdin
            assert process.stdout
            for _ in range(steps):  # it waits for us at every step
                process.stdout.readline()
                process.stdin.write("\n")
                process.stdin.flush()
            time.sleep(drawn.random() * 0.01)
            workers_of_it = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            process.send_signal(signal.SIGKILL)
        _wait_for_the_end(workers_of_it.split())
    assert (out / "unfinished.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, check=True, input="")
    assert int(done.stdout.split()[0]) >= 3
    assert contents(out) == contents(tmp_path / "whole")


def _wait_for_the_end(processes: list[str]) -> None:
    """Workers of a parent that was killed end by themselves, and soon."""
    for _ in range(100):
        if not any(Path("/proc", number).exists() for number in processes):
            return
        time.sleep(0.05)
    raise AssertionError("a worker outlived its parent")


def test_what_a_killed_process_had_begun_is_cleared_away(source: Path, tmp_path: Path) -> None:
    whole = contents(make(source, tmp_path / "out").folder)
    for name in (".train-00001.bin.a1b2", ".train-00001.json.c3", ".index.json.d4"):
        (tmp_path / "out" / name).mkdir()
        (tmp_path / "out" / name / "half").write_text("half")
    assert contents(make(source, tmp_path / "out").folder) == whole


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_what_is_missing_is_written_again(
    source: Path, tmp_path: Path, name: str, damage: str
) -> None:
    whole = contents(make(source, tmp_path / "out").folder)
    path = tmp_path / "out" / name
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-2])
    assert contents(make(source, tmp_path / "out").folder) == whole


@pytest.mark.parametrize(
    ("key", "value"), [("names", 3), ("names", []), ("bytes", [0]), ("sha256", "x"), ("tokens", "")]
)
def test_a_shard_that_was_tampered_with_is_written_again(
    source: Path, tmp_path: Path, key: str, value: object
) -> None:
    out = make(source, tmp_path / "out", shard_tokens=1).folder
    whole = contents(out)
    described = json.loads(whole["train-00001.json"])
    (out / "train-00001.json").write_text(json.dumps({**described, key: value}))
    make(source, out, shard_tokens=1).verify()
    assert contents(out) == whole


@pytest.mark.parametrize("kind", ["byte", "character", "bpe"])
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_a_file_that_is_read_in_pieces_has_the_same_tokens(
    tmp_path: Path, bpe: Path, write: Write, monkeypatch: pytest.MonkeyPatch, kind: str, piece: int
) -> None:
    drawn = random.Random(piece)
    words = ["the", "naïve", "日本\r", "fox\r\n", "\n\n", " ", "\r\r\n", "it's", "😀"]
    text = "\ufeff\r\n" + " ".join(drawn.choices(words, k=1000))
    broken = b"\xe9\xf0\x9f" if kind != "bpe" else b""
    source = write("source", a=text.encode() + broken)
    settings = {"tokenizer": str(bpe) if kind == "bpe" else kind, "shard_tokens": 10_000}
    whole = contents(make(source, tmp_path / "whole", **settings).folder)
    monkeypatch.setattr("stateline.data.documents.FileDocument.piece_bytes", piece)
    assert contents(make(source, tmp_path / "pieces", **settings).folder) == whole


def test_a_tokenizer_of_pairs_encodes_long_text_in_pieces(bpe: Path) -> None:
    tokenizer, text = load_tokenizer(bpe), "the theory of the thing, it's naïve 日本語\n" * 200
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    parts = list(tokenizer.encode_pieces(pieces))
    assert len(parts) > 5
    assert np.concatenate(parts).tolist() == tokenizer.encode(text).tolist()


@pytest.mark.slow  # in a process of its own
def test_a_large_file_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    code = """
import re, sys
from stateline.data import write_corpus
write_corpus(sys.argv[1:2], sys.argv[2], workers=1)
print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
"""
    peaks = []
    for size in (8, 128):
        (tmp_path / f"{size}.txt").write_bytes((b"0123456789abcde\n" * (1 << 16)) * size)
        command = [sys.executable, "-c", code, str(tmp_path / f"{size}.txt"), str(tmp_path / "o")]
        command[-1] += str(size)
        peaks.append(int(subprocess.run(command, capture_output=True, check=True).stdout))
    assert peaks[1] < peaks[0] + (32 << 10)


def test_shards_of_another_plan_are_not_taken_over(source: Path, tmp_path: Path) -> None:
    wanted = contents(make(source, tmp_path / "wanted").folder)
    make(source, tmp_path / "out", newlines="keep")
    (tmp_path / "out" / "index.json").unlink()
    found = contents(make(source, tmp_path / "out").folder)
    assert wanted.items() <= found.items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "character"}, "made with a different tokenizer: choose another folder"),
        ({"newlines": "keep"}, "made with newlines='unify', not 'keep'"),
        ({"held_out": 0.3}, "made with held_out=0.1, not 0.3"),
        ({"shard_tokens": 9}, "made with shard_tokens=300, not 9"),
        ({"splits": "splits.json"}, "made with "),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_recipe_is_refused_and_nothing_is_overwritten(
    source: Path, tmp_path: Path, settings: dict[str, Any], message: str, finished: bool
) -> None:
    if "splits" in settings:
        lists = {"train": ["00.txt"], "valid": ["01.txt"]}
        (tmp_path / "splits.json").write_text(json.dumps(lists))
        settings = {"splits": str(tmp_path / "splits.json")}
    out = make(source, tmp_path / "out").folder
    if not finished:
        (out / "index.json").rename(out / "unfinished.json")
    before = contents(out)
    with pytest.raises(InputError, match=message):
        make(source, out, **settings)
    assert contents(out) == before


def test_a_corpus_whose_documents_were_held_out_by_name_is_refused(
    source: Path, tmp_path: Path
) -> None:
    out = make(source, tmp_path / "out").folder
    index = json.loads((out / "index.json").read_text())
    del index["settings"]["held_out_by"]
    (out / "index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="made with held_out_by=None, not 'text': choose another"):
        make(source, out)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"00.txt": "new"}, "source/00.txt"), ({"new": "new"}, "source/new")],
)
def test_other_sources_are_refused(
    source: Path, tmp_path: Path, write: Write, changes: dict[str, str], name: str
) -> None:
    make(source, tmp_path / "out")
    write("source", **changes)
    with pytest.raises(InputError, match=rf"made from other sources \({name} differs\): choose"):
        make(source, tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line_and_what_was_written_stays(
    source: Path,
    tmp_path: Path,
    full_disk: Callable[[int], AbstractContextManager[None]],
    workers: int,
) -> None:
    long = tmp_path / "source" / "35.txt"  # only its shard does not fit
    long.write_text("long " * 5000)
    recipe, out = CorpusSettings(shard_tokens=300, held_out=0.0), tmp_path / "out"
    with full_disk(20_000), pytest.raises(InputError, match=r"^cannot write .*: File too large"):
        write_corpus([source], out, recipe, workers=workers)
    assert not (out / "index.json").exists()
    kept = {name: text for name, text in contents(out).items() if name != "unfinished.json"}
    assert len(kept) > 20
    write_corpus([source], out, recipe, workers=workers)
    assert kept.items() <= contents(out).items()
    assert not any(name.startswith(".") for name in contents(out))


def test_a_splits_file_decides_and_the_rest_is_left_out(source: Path, tmp_path: Path) -> None:
    lists = {"train": ["source/03.txt"], "valid": ["04.txt"], "test": ["05.txt", "06.txt"]}
    (tmp_path / "splits.json").write_text(json.dumps(lists))
    told: list[Progress] = []
    recipe = CorpusSettings(splits=str(tmp_path / "splits.json"))
    corpus = write_corpus([source], tmp_path / "out", recipe, workers=1, progress=told.append)
    assert {name: split.names for name, split in corpus.splits.items()} == {
        "train": ["source/03.txt"],
        "held_out": ["source/04.txt"],
        "test": ["source/05.txt", "source/06.txt"],
    }
    assert told[0].left_out == 36


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet", ""])
def test_rows_in_front_do_not_move_the_others_and_copies_are_on_one_side(
    tmp_path: Path, ending: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sides = []
    rows = [f"row {number % 25}" for number in range(50)]
    for texts_ in (rows, ["new", "row 3", *rows]):
        corpus = make(_rows(tmp_path / f"{len(texts_)}.{ending}", texts_), tmp_path / texts_[0])
        sides.append({split: set(texts(corpus, split).values()) for split in corpus.splits})
    capfd.readouterr()
    before, after = sides
    assert not before["train"] & before["held_out"]
    assert before["train"] | before["held_out"] == set(rows)
    assert {split: side - {"new"} for split, side in after.items()} == before


def _rows(path: Path, rows: list[str]) -> Path:
    """A file, or the folder of a saved data set, with these documents."""
    if not path.suffix:
        pytest.importorskip("datasets").Dataset.from_dict({"text": rows}).save_to_disk(path)
    elif path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"text": rows}), path)
    else:
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def test_rows_of_a_data_set_are_documents(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [f"row {number} 日本" for number in range(30)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "saved")
    capfd.readouterr()
    corpus = write_corpus([tmp_path / "saved"], tmp_path / "out", workers=1)
    found = texts(corpus, "train") | texts(corpus, "held_out")
    assert found == {f"saved:{number}": text for number, text in enumerate(rows)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 1.0}, "held_out must be from 0 to less than 1, got 1.0"),
        ({"held_out": -0.1}, "held_out must be from 0 to less than 1, got -0.1"),
        ({"shard_tokens": 0}, "shard_tokens must be at least 1, got 0"),
        ({"tokenizer": "nowhere"}, "there is no tokenizer nowhere"),
    ],
)
def test_a_recipe_that_cannot_be_used_leaves_nothing_behind(
    source: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make(source, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_text_that_the_tokenizer_cannot_read_is_named(
    write: Write, tmp_path: Path, bpe: Path
) -> None:
    source = write("source", a="alpha", b=b"b\xe9ta")
    with pytest.raises(InputError, match=r"^source/b: this tokenizer needs text in UTF-8"):
        make(source, tmp_path / "out", tokenizer=str(bpe))


def test_no_workers_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="workers must be at least 1, got 0"):
        write_corpus([source], tmp_path / "out", workers=0)


def test_a_corpus_inside_its_source_is_refused(source: Path) -> None:
    with pytest.raises(InputError, match="must not be inside the source"):
        write_corpus([source], source / "out")


def test_a_folder_that_cannot_be_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write "):
        make(source, tmp_path / "file" / "out")


class TestOpening:
    @pytest.fixture
    def out(self, source: Path, tmp_path: Path) -> Path:
        return make(source, tmp_path / "out").folder

    def test_a_corpus_that_is_whole_verifies(self, out: Path) -> None:
        open_corpus(str(out)).verify()

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            (
                "train-00001.bin",
                None,
                r"train-00001.bin must have \d+ bytes, but is missing: repeat",
            ),
            ("train-00001.bin", b"\0" * 3, "train-00001.bin must have .* bytes, but has 3 bytes:"),
            (
                "train-00001.json",
                None,
                "cannot read the corpus file .*train-00001.json: No such file",
            ),
            (
                "train-00001.json",
                b"{",
                "corpus file .*train-00001.json is not JSON: .*; repeat the",
            ),
            ("train-00001.json", b"{}", "is damaged: Object missing required field `plan`; repeat"),
            ("train-00001.json", b"[" * 100_000, "nested too deeply"),
            ("index.json", None, "no corpus in .*: index.json is missing; make one with stateline"),
            ("index.json", b"{", "index.json is not JSON: "),
            ("index.json", b"[]", "index.json must be a JSON object, got a list; repeat the"),
            ("index.json", b"{}", "must be of the format stateline-corpus, version 1, got None"),
            (
                "index.json",
                b'{"format": "stateline-corpus", "version": 1}',
                "index.json is damaged: Object missing required field `tokenizer`; repeat",
            ),
        ],
    )
    def test_damage_is_one_line_that_names_the_file(
        self, out: Path, name: str, change: bytes | None, message: str
    ) -> None:
        (out / name).unlink() if change is None else (out / name).write_bytes(change)
        with pytest.raises(InputError, match=message) as caught:
            open_corpus(out)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("place", "value", "message"),
        [
            (["dtype"], "<f2", "Invalid enum value '<f2'"),
            (["dtype"], [["a", "<i4"]], "Expected `str`, got `array`"),
            (["settings"], [], "Expected `object`, got `array`"),
            (["settings", "newlines"], "both", "Invalid enum value 'both'"),
            (["splits"], [[1]], "Expected `object`, got `array`"),
            (["splits", "dev"], [], "Invalid enum value 'dev'"),
            (["splits", "train"], [[[]]], "Expected `object`, got `array`"),
            (["splits", "train", 0, "name"], "../../etc/train-00000", "matching regex"),
            (["splits", "train", 0, "tokens"], -1, "Expected `int` >= 0"),
            (["splits", "train", 0, "tokens"], 1e30, "Expected `int`"),
            (["splits", "train", 0, "bytes"], 0, "its sizes differ from the sizes in the index"),
            (["splits", "train", 0, "documents"], 7**9, "number of documents differs"),
            (["splits", "train", 0, "sha256"], "x", "matching regex"),
            (["vocab_size"], 0, "Expected `int` >= 1"),
            (["tokenizer"], None, "Expected `str`, got `null`"),
        ],
    )
    def test_an_index_of_wrong_types_or_sizes_is_refused(
        self, out: Path, place: list[str | int], value: object, message: str
    ) -> None:
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        index = json.loads(before["index.json"])
        inside = index
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = value
        (out / "index.json").write_text(json.dumps(index))
        with pytest.raises(InputError, match=message) as caught:
            open_corpus(out)
        assert "\n" not in str(caught.value)
        assert "repeat the command that made it" in str(caught.value)

    @pytest.mark.parametrize(
        ("key", "change", "message"),
        [
            ("names", lambda own: own[1:], "number of documents differs"),
            ("tokens", lambda own: [own[0] + 1, *own[1:]], "its sizes differ from the sizes in"),
            ("bytes", lambda own: [0 for _ in own], "it has tokens but no bytes"),
        ],
    )
    def test_documents_that_do_not_fit_the_index_are_refused(
        self, out: Path, key: str, change: Callable[[list[Any]], list[Any]], message: str
    ) -> None:
        described, index = (
            json.loads((out / name).read_text()) for name in ("train-00001.json", "index.json")
        )
        described[key] = change(described[key])
        (out / "train-00001.json").write_text(json.dumps(described))
        if key == "bytes":
            index["splits"]["train"][1]["bytes"] = 0
            (out / "index.json").write_text(json.dumps(index))
        with pytest.raises(InputError, match=f"train-00001.json is damaged: .*{message}"):
            open_corpus(out)

    def test_tokens_outside_the_vocabulary_are_found_before_training(
        self, source: Path, tmp_path: Path
    ) -> None:
        out = make(source, tmp_path / "characters", tokenizer="character").folder
        file = out / "held_out-00000.bin"
        tokens = bytearray(file.read_bytes())
        tokens[20] = 255
        file.write_bytes(tokens)
        with pytest.raises(
            InputError, match=r"held_out-00000.bin .* has token 255, .* at 2\d; del"
        ):
            Tokens(path=str(out))

    def test_tokens_of_two_bytes_load_and_stay(self, out: Path, source: Path) -> None:
        """As corpora were that an older version made of bytes."""
        new = open_corpus(out)
        index = json.loads((out / "index.json").read_text())
        (out / "index.json").write_text(json.dumps({**index, "dtype": "<u2"}))
        for file in out.glob("*.bin"):
            np.fromfile(file, "|u1").astype("<u2").tofile(file)
        before, old = contents(out), open_corpus(out)
        old.verify()
        assert old.sha256 == new.sha256
        assert texts(old, "train") == texts(make(source, out.parent / "new"), "train")
        make(source, out).verify()
        assert {name for name in before if contents(out)[name] != before[name]} <= {"index.json"}

    def test_an_unfinished_corpus_says_so(self, out: Path) -> None:
        (out / "index.json").rename(out / "unfinished.json")
        with pytest.raises(InputError, match="is unfinished: run the command that makes it again"):
            open_corpus(out)

    @pytest.mark.parametrize("name", ["held_out-00000.bin", "train-00002.json"])
    def test_a_changed_byte_is_found(self, out: Path, name: str) -> None:
        changed = bytearray((out / name).read_bytes())
        place = changed.index(b"source/") if name.endswith("json") else 10
        changed[place] ^= 1
        (out / name).write_bytes(changed)
        with pytest.raises(InputError, match=f"{name} is damaged: delete it; "):
            open_corpus(out).verify()

    def test_a_tokenizer_that_was_exchanged_is_found(self, out: Path) -> None:
        text = '{"type": "stateline-character", "characters": "ab"}'
        (out / "tokenizer.json").write_text(text)
        with pytest.raises(InputError, match=r"tokenizer.json is not what made the corpus"):
            open_corpus(out).verify()

    def test_the_hash_tells_another_corpus(self, out: Path, source: Path, tmp_path: Path) -> None:
        other = make(source, tmp_path / "other", newlines="keep")
        assert open_corpus(out).sha256 != other.sha256
        assert open_corpus(out).sha256 == make(source, tmp_path / "same").sha256


def test_the_hash_of_tokens_does_not_depend_on_how_they_are_stored() -> None:
    hashes = set()
    for dtype in ("u1", "<u2", ">u2"):
        digest = TokenHash()
        digest.update(np.arange(256).astype(dtype))
        hashes.add(digest.hexdigest())
    assert len(hashes) == 1


def test_documents_are_kept_without_a_token_that_begins_them(
    write: Callable[..., Path], bpe: Path, tmp_path: Path
) -> None:
    """A model that is trained on them reads no such token in generation, either."""
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer.from_file(str(bpe))
    made.post_processor = package.processors.TemplateProcessing(
        single=["a", "$A"], special_tokens=[("a", made.token_to_id("a"))]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    recipe = CorpusSettings(str(tmp_path / "tokenizer.json"), held_out=0.0)
    corpus = write_corpus([write("source", b="the")], tmp_path / "out", recipe, workers=1)
    text, tokenizer = corpus.splits["train"].text, corpus.tokenizer
    assert [*text.read(0, len(text))] == tokenizer.encode("the").tolist()
    assert tokenizer.prompt("the").tolist() == tokenizer.encode("the").tolist()


def test_the_end_of_text_follows_every_document(
    write: Callable[..., Path], bpe: Path, tmp_path: Path
) -> None:
    described = json.loads(bpe.read_text())
    described["added_tokens"] = [
        {"id": 270, "content": "<|endoftext|>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    source, out = write("source", a="the", b="thing"), tmp_path / "out"
    settings = {"tokenizer": str(tmp_path / "tokenizer.json"), "held_out": 0.0}
    plain = write_corpus([source], tmp_path / "plain", CorpusSettings(**settings), workers=1)
    recipe = CorpusSettings(**settings, end_of_text=True)
    ended = write_corpus([source], out, recipe, workers=1).splits["train"]
    text, borders = plain.splits["train"].text, plain.splits["train"].text.borders
    parts = [[*text.read(a, b), 270] for a, b in itertools.pairwise(map(int, borders))]
    assert [*ended.text.read(0, len(ended.text))] == [*itertools.chain(*parts)]
    assert ended.bytes.tolist() == [3, 5]
    with pytest.raises(InputError, match="with end_of_text=True, not False"):
        write_corpus([source], out, CorpusSettings(**settings), workers=1)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "th"}')
    with pytest.raises(InputError, match="made with a different tokenizer"):
        write_corpus([source], out, recipe, workers=1)
    other = write_corpus([source], tmp_path / "other", recipe, workers=1)
    (other.folder / "index.json").unlink()
    assert write_corpus([source], other.folder, recipe, workers=1).sha256 == other.sha256
    with pytest.raises(InputError, match="byte has no end-of-text token"):
        write_corpus([source], tmp_path / "no", CorpusSettings(end_of_text=True), workers=1)


def test_parts_and_splits_exclude_each_other() -> None:
    for settings in ({"parts": [1]}, {"parts": [5, 5], "splits": "a.json"}):
        with pytest.raises(InputError, match="parts must be two or three numbers"):
            CorpusSettings(**settings)  # type: ignore[arg-type]
