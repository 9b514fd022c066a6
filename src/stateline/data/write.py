"""Writing a corpus: worker processes write shards, each completely or not at all."""

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

from stateline.data.corpus import INDEX, UNFINISHED, Corpus, open_corpus
from stateline.data.documents import Newlines
from stateline.data.index import FORMAT, VERSION
from stateline.data.load import load_tokenizer
from stateline.data.plan import CorpusSettings, Plan, Unit, encode_part, make_plan
from stateline.data.splits import SPLITS
from stateline.data.tokenizer import FILE, Tokenizer, utf8
from stateline.errors import InputError
from stateline.files import read_json_object, sha256, user_path, write_atomically, write_text
from stateline.workers import cores, serve_parent


class Progress(NamedTuple):
    """Progress in writing a corpus.

    Attributes:
        done: Number of finished shards.
        shards: Number of shards in all.
        tokens: Tokens in the finished shards.
        left_out: Documents in no split.
    """

    done: int
    shards: int
    tokens: int
    left_out: int


def write_corpus(
    sources: Sequence[str | Path],
    folder: str | Path,
    settings: CorpusSettings | None = None,
    *,
    workers: int | None = None,
    progress: Callable[[Progress], object] = lambda _: None,
) -> Corpus:
    """Turn text into tokens on disk.

    The result does not depend on the number of workers or on interruptions: shards that an earlier
    call with the same sources and settings has written are kept.

    Args:
        sources: Files, folders, ``*.jsonl``, folders of ``Dataset.save_to_disk``.
        folder: Folder for the corpus.
        settings: How it is made; by default with bytes as tokens.
        workers: Number of processes; by default one per core.
        progress: Called whenever a shard is done.

    Returns:
        The corpus.

    Raises:
        InputError: If a source cannot be used, or the folder holds another corpus or cannot be
            written to.
    """
    folder = user_path(folder, "folder for the corpus")
    paths = [user_path(source, "source") for source in sources]
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    for path in paths:
        if folder.resolve().is_relative_to(path.resolve()):
            raise InputError(f"{folder} must not be inside the source {path}: choose another")
    plan = make_plan(paths, settings or CorpusSettings())
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
    """Record the settings in the folder, unless it holds something else."""
    for file in (folder / INDEX, folder / UNFINISHED):
        if file.is_file():
            _compare(folder, _recorded(file), plan.settings)
            break
    else:
        _check_free(folder)
        write_text(folder / UNFINISHED, json.dumps({"settings": plan.settings}, indent=1))
    plan.tokenizer.save(folder / FILE)


def _check_free(folder: Path) -> None:
    """Raise InputError if the folder holds files of anything but an unfinished corpus."""
    own = (FILE, *(f"{split}-[0-9]*" for split in SPLITS))
    others = [
        path.name
        for path in folder.glob("[!.]*")
        if not (path.is_file() and any(fnmatch(path.name, pattern) for pattern in own))
    ]
    if others:
        raise InputError(
            f"{folder} must be empty or hold a corpus, but has {min(others)}: choose another "
            "folder with --out"
        )


def _recorded(file: Path) -> dict[str, Any]:
    settings = read_json_object(file, "file of the corpus").get("settings")
    sources = settings.get("sources") if isinstance(settings, dict) else None
    if not isinstance(sources, list) or not all(_is_source(source) for source in sources):
        raise InputError(f"{file} is damaged: delete its folder, or choose another one with --out")
    assert isinstance(settings, dict)
    return settings


def _is_source(value: object) -> bool:
    """Whether this is the name and the hash of a file."""
    return isinstance(value, list) and [type(part) for part in value] == [str, str]


def _compare(folder: Path, recorded: dict[str, Any], settings: dict[str, Any]) -> None:
    for key in {**settings, **recorded}:
        value: Any = settings.get(key)
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
    """Number of tokens of a shard of this plan that is already complete, or None."""
    try:
        described = json.loads((folder / f"{unit.name}.json").read_text(encoding="utf-8"))
        size = (folder / f"{unit.name}.bin").stat().st_size
        n_tokens = sum(described["tokens"])
        whole = described["plan"] == plan.key and size == n_tokens * _dtype(plan).itemsize
    except (OSError, ValueError, RecursionError, LookupError, TypeError, OverflowError):
        return None
    return n_tokens if whole else None


def _dtype(plan: Plan) -> np.dtype[Any]:
    return np.dtype("<u2" if plan.tokenizer.vocab_size <= 1 << 16 else "<u4")


class _Order(NamedTuple):
    """What a worker needs besides its unit."""

    folder: Path
    newlines: Newlines
    dtype: str
    plan: str
    end_of_text: int | None


def _write_units(
    units: Sequence[Unit], folder: Path, plan: Plan, workers: int
) -> Iterator[tuple[str, int]]:
    """Name and number of tokens of each shard as it is finished."""
    ended = plan.tokenizer.end_of_text if plan.settings.get("end_of_text") else None
    order = _Order(folder, plan.settings["newlines"], _dtype(plan).str, plan.key, ended)
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
            "a worker process was killed, perhaps because memory ran out: the same command "
            "continues, and needs less memory with --workers 1"
        ) from error
    finally:  # shards under way are finished, others are not begun
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
        tokens = encode_part(tokenizer, text, document)
        if order.end_of_text is not None:
            tokens = np.append(tokens, order.end_of_text)
        parts.append(tokens.astype(order.dtype))
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
    # Last: its presence means that the tokens are complete.
    write_text(path.with_suffix(".json"), json.dumps(described))
    return unit.name, sum(map(len, parts))


@lru_cache(maxsize=1)
def _load_tokenizer(file: Path) -> Tokenizer:
    return load_tokenizer(file)


def _finish(folder: Path, plan: Plan) -> None:
    """Write the index, and delete temporary files."""
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
        "documents_sha256": sha256(described_by),
    }
