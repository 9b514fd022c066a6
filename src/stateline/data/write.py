"""Writing a corpus: shards in processes of their own, each whole or not at all."""

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stateline.data.corpus import (
    FORMAT,
    INDEX,
    UNFINISHED,
    VERSION,
    Corpus,
    open_corpus,
    sha256_of,
)
from stateline.data.documents import Newlines
from stateline.data.load import load_tokenizer
from stateline.data.recipe import Plan, Recipe, Unit, encode_part, make_plan
from stateline.data.splits import SPLITS
from stateline.data.tokenizer import FILE, Tokenizer, utf8
from stateline.errors import InputError
from stateline.files import write_atomically, write_text
from stateline.workers import cores, serve_parent


class Progress(NamedTuple):
    """How far a corpus is.

    Attributes:
        done: Shards that are written.
        shards: Shards there will be.
        tokens: Tokens in those that are written.
        left_out: Documents that are in no split.
    """

    done: int
    shards: int
    tokens: int
    left_out: int


def write_corpus(
    sources: Sequence[str | Path],
    folder: str | Path,
    recipe: Recipe | None = None,
    *,
    workers: int | None = None,
    progress: Callable[[Progress], object] = lambda _: None,
) -> Corpus:
    """Turn text into tokens on disk.

    The result does not depend on the number of workers, nor on being stopped and started again:
    what an earlier call with the same sources and recipe has written is kept.

    Args:
        sources: Files, folders, ``*.jsonl``, folders of ``Dataset.save_to_disk``.
        folder: Where the corpus shall be.
        recipe: How it is made; by default in bytes.
        workers: Processes; by default one per core.
        progress: Called whenever a shard is done.

    Returns:
        The corpus.

    Raises:
        InputError: If a source cannot be used, the folder holds another corpus, or it cannot be
            written to.
    """
    folder, paths = Path(folder).expanduser(), [Path(source).expanduser() for source in sources]
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    for path in paths:
        if folder.resolve().is_relative_to(path.resolve()):
            raise InputError(f"{folder} must not be inside the source {path}: choose another")
    plan = make_plan(paths, recipe or Recipe())
    _claim(folder, plan)
    done = {unit.name: n for unit in plan.units if (n := _done(folder, unit, plan)) is not None}
    missing = [unit for unit in plan.units if unit.name not in done]
    progress(Progress(len(done), len(plan.units), sum(done.values()), plan.left_out))
    for name, n_tokens in _write_units(missing, folder, plan, workers or cores()):
        done[name] = n_tokens
        progress(Progress(len(done), len(plan.units), sum(done.values()), plan.left_out))
    _finish(folder, plan)
    return open_corpus(folder)


def _claim(folder: Path, plan: Plan) -> None:
    """Record what the folder is for, unless it is for something else."""
    for file in (folder / INDEX, folder / UNFINISHED):
        if file.is_file():
            _compare(folder, _recorded(file), plan.settings)
            break
    else:
        _check_free(folder)
        write_text(folder / UNFINISHED, json.dumps({"settings": plan.settings}, indent=1))
    plan.tokenizer.save(folder / FILE)


def _check_free(folder: Path) -> None:
    """Raise InputError if there is anything that is not of a corpus without its index."""
    own = (FILE, *(f"{split}-[0-9]*" for split in SPLITS))
    names = [path.name for path in folder.glob("[!.]*")]
    if others := [name for name in names if not any(fnmatch(name, pattern) for pattern in own)]:
        raise InputError(
            f"{folder} must be empty or hold a corpus, but has {min(others)}: choose another "
            "folder with --out"
        )


def _recorded(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))["settings"]
        if not isinstance(settings, dict):
            raise TypeError("settings must be an object")
        return settings
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(
            f"{file} is damaged: delete its folder, or choose another one with --out"
        ) from error


def _compare(folder: Path, recorded: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        before = recorded.get(key)
        if before == value:
            continue
        difference = f"with {key}={before!r}, not {value!r}"
        if key in ("tokenizer", "splits"):
            difference = f"with a different {key.removesuffix('s')}"
        elif key == "sources":
            pairs = set(map(tuple, before or ())) ^ set(map(tuple, value))
            difference = f"from other sources ({min(pairs)[0] if pairs else 'their order'} differs)"
        raise InputError(
            f"the corpus in {folder} was made {difference}: choose another folder, or delete it"
        )


def _done(folder: Path, unit: Unit, plan: Plan) -> int | None:
    """Tokens of a shard that is already there, whole, and of this plan."""
    try:
        described = json.loads((folder / f"{unit.name}.json").read_text(encoding="utf-8"))
        size = (folder / f"{unit.name}.bin").stat().st_size
        n_tokens = sum(described["tokens"])
        whole = described["plan"] == plan.key and size == n_tokens * _dtype(plan).itemsize
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return n_tokens if whole else None


def _dtype(plan: Plan) -> np.dtype[Any]:
    return np.dtype("<u2" if plan.tokenizer.vocab_size <= 1 << 16 else "<u4")


class _Order(NamedTuple):
    """What a worker has to know besides its unit."""

    folder: Path
    newlines: Newlines
    dtype: str
    plan: str


def _write_units(
    units: Sequence[Unit], folder: Path, plan: Plan, workers: int
) -> Iterator[tuple[str, int]]:
    """Name and tokens of each shard when it is written."""
    order = _Order(folder, plan.settings["newlines"], _dtype(plan).str, plan.key)
    if min(workers, len(units)) < 2:
        yield from (_write_unit(unit, order) for unit in units)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(units)), context, initializer=serve_parent)
    try:
        futures = [pool.submit(_write_unit, unit, order) for unit in units]
        yield from (future.result() for future in as_completed(futures))
    except BrokenProcessPool as error:
        raise InputError(
            "a process was killed, perhaps for want of memory: the same command goes on, and with "
            "--workers 1 needs less"
        ) from error
    finally:  # what has begun is finished, what has not is not begun
        pool.shutdown(cancel_futures=True)


def _write_unit(unit: Unit, order: _Order) -> tuple[str, int]:
    tokenizer = _load_tokenizer(order.folder / FILE)
    parts, n_bytes = list[np.ndarray](), list[int]()
    for document in unit.documents:
        try:
            text = document.text(order.newlines)
        except OSError as error:
            raise InputError(
                f"cannot read {document.path}: {error.strerror}; do not change the sources"
            ) from error
        n_bytes.append(len(utf8(text)))
        parts.append(encode_part(tokenizer, text, document).astype(order.dtype))
    contents = b"".join(part.tobytes() for part in parts)
    described = {
        "plan": order.plan,
        "sha256": hashlib.sha256(contents).hexdigest(),
        "names": [document.name for document in unit.documents],
        "tokens": [len(part) for part in parts],
        "bytes": n_bytes,
    }
    path = order.folder / f"{unit.name}.bin"
    write_atomically(path, lambda temporary: temporary.write_bytes(contents))
    write_text(path.with_suffix(".json"), json.dumps(described))  # last: it vouches for the tokens
    return unit.name, sum(map(len, parts))


@lru_cache(maxsize=1)
def _load_tokenizer(file: Path) -> Tokenizer:
    return load_tokenizer(file)


def _finish(folder: Path, plan: Plan) -> None:
    """Write the index, and clear away what is no longer needed."""
    splits: dict[str, list[dict[str, Any]]] = {}
    for split in SPLITS:
        units = [unit for unit in plan.units if unit.name.rpartition("-")[0] == split]
        if units:
            splits[split] = [_entry(folder / f"{unit.name}.json") for unit in units]
    index = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": plan.settings["tokenizer"],
        "vocab_size": plan.tokenizer.vocab_size,
        "dtype": _dtype(plan).str,
        "settings": plan.settings,
        "splits": splits,
    }
    write_text(folder / INDEX, json.dumps(index, indent=1))
    (folder / UNFINISHED).unlink(missing_ok=True)
    for name in (INDEX, FILE, UNFINISHED, *(f"{unit.name}.*" for unit in plan.units)):
        for temporary in folder.glob(f".{name}.*"):  # of a process that was killed
            temporary.unlink(missing_ok=True)


def _entry(described_by: Path) -> dict[str, Any]:
    described = json.loads(described_by.read_text(encoding="utf-8"))
    return {
        "name": described_by.stem,
        "documents": len(described["names"]),
        "tokens": sum(described["tokens"]),
        "bytes": sum(described["bytes"]),
        "sha256": described["sha256"],
        "documents_sha256": sha256_of(described_by),
    }
