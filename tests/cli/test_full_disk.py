"""A full disk: the command prints one line, damages no file, and works once there is room."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stateline.cli import main
from stateline.data import open_corpus

Refused = Callable[..., str]

FULL = "No space left on device"
TRAIN = "train recipe.yaml --out disk/run"
COMPARE = (
    "compare 'h3(d_state=4)' --tasks 'text(path=book.txt, length=16, batch_size=2)' "
    "--d_model 8 --steps 2 --protocol quick --out disk/all"
)
DATA = "data source --out disk/corpus --workers 1"


@pytest.fixture(autouse=True)
def disk(folder: Path) -> Iterator[Path]:
    """A small disk, in the current folder."""
    place = folder / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, room: int = 0) -> None:
    """Fill the disk until only this number of bytes is free."""
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - room))


def empty(disk: Path) -> None:
    (disk / "filler").unlink()


def leftovers(disk: Path) -> list[Path]:
    """Temporary files and folders."""
    return list(disk.rglob(".*"))


def test_training_leaves_its_older_checkpoint_whole_and_goes_on(
    refused: Refused, disk: Path
) -> None:
    older = "checkpoints/step-00000002"
    shutil.copytree(f"run/{older}", disk / "run" / older)
    shutil.copy("run/config.yaml", disk / "run")
    fill(disk, room=20_000)
    new = ("events.*", "metrics.jsonl", "tokenizer.json")
    told = refused(f"{TRAIN} --resume", new=new, said="continuing from disk/run/checkpoints")
    assert told.startswith("cannot write disk/run/checkpoints/step-00000004: ")
    assert FULL in told
    assert leftovers(disk) == []
    empty(disk)
    assert main(shlex.split(f"{TRAIN} --resume")) == 0
    whole, resumed = (Path(name, "model.safetensors").read_bytes() for name in ("run", "disk/run"))
    assert whole == resumed


def test_a_corpus_without_room_is_finished_later(refused: Refused, disk: Path) -> None:
    Path("source/4.txt").write_text("one more document. " * 4000)
    fill(disk, room=60_000)
    told = refused(DATA, new=("disk/corpus*", "disk/corpus/*"), said="0 of 2 shards")
    assert told == f"cannot write disk/corpus/train-00000.bin: {FULL}; choose another folder"
    assert leftovers(disk) == []
    empty(disk)
    assert main(shlex.split(DATA)) == 0
    open_corpus(disk / "corpus").verify()


@pytest.mark.usefixtures("quick_speed", "one_process")
def test_a_comparison_without_room_is_finished_later(refused: Refused, disk: Path) -> None:
    fill(disk, room=40_000)
    told = refused(COMPARE, new=("*",), said="1 run")
    assert told.startswith("cannot write disk/all/runs/text-path-book-txt-length-16-batch")
    assert FULL in told
    assert not json.loads((disk / "all" / "results.json").read_text())["finished"]
    assert leftovers(disk) == []
    empty(disk)
    assert main(shlex.split(COMPARE)) == 0
    assert json.loads((disk / "all" / "results.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("command", "file", "said"),
    [
        ("generate run --prompt to --max_new_tokens 3 --save-state disk/old", "disk/old", "to"),
        ("evaluate run book.txt --out disk/old", "disk/old", "read in chunks of 1,024 tokens"),
        ("report run --out disk", "disk/report.html", ""),
        (TRAIN, "disk/run/config.yaml", ""),
        (DATA, "disk/corpus/unfinished.json", ""),
        (COMPARE, "disk/all/results.json", ""),
    ],
)
def test_what_finds_no_room_is_named_and_the_old_stays(
    refused: Refused, disk: Path, command: str, file: str, said: str
) -> None:
    shutil.copy("state", disk / "old")
    fill(disk)
    told = refused(command, new=("disk/run", "disk/corpus", "disk/all"), said=said)
    assert told.startswith(f"cannot write {file}: ")
    assert FULL in told
    assert leftovers(disk) == []
