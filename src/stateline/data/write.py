"""Writing a corpus: worker processes write shards, each completely or not at all."""

import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
from jaxtyping import Int

from stateline.data.corpus import INDEX, UNFINISHED, Corpus, open_corpus
from stateline.data.documents import Document, Newlines
from stateline.data.huggingface import SETTINGS
from stateline.data.index import (
    FORMAT,
    VERSION,
    ShardDocuments,
    ShardEntry,
    TokenDtype,
    TokenHash,
    parse,
)
from stateline.data.load import load_tokenizer
from stateline.data.plan import CorpusSettings, Plan, Unit, encode_pieces, make_plan
from stateline.data.splits import SPLITS
from stateline.data.tokenizer import FILE, utf8
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
        sources: Files, folders, rows (``*.jsonl``, ``*.jsonl.gz``, ``*.parquet``), folders of
            ``Dataset.save_to_disk``.
        folder: Folder for the corpus.
        settings: How it is made; by default with bytes as tokens.
        workers: Number of processes; by default one per core.
        progress: Called whenever a shard is done.

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
    dtype = _claim(folder, plan)
    found = {unit.name: _done(folder, unit, plan, dtype) for unit in plan.units}
    done = {name: entry for name, entry in found.items() if entry is not None}
    missing = [unit for unit in plan.units if unit.name not in done]

    def tell() -> None:
        tokens = sum(entry.tokens for entry in done.values())
        progress(Progress(len(done), len(plan.units), tokens, plan.left_out))

    tell()
    for entry in _write_units(missing, folder, plan, dtype, workers or cores()):
        done[entry.name] = entry
        tell()
    _finish(folder, plan, dtype, done)
    return open_corpus(folder)


def _claim(folder: Path, plan: Plan) -> np.dtype[Any]:
    """Record the settings in the folder, unless it holds something else.

    Returns:
        The dtype of the tokens: the smallest that fits, or the corpus's own if that is wider.
    """
    dtype = np.min_scalar_type(plan.tokenizer.vocab_size - 1).newbyteorder("<")
    for file in (folder / INDEX, folder / UNFINISHED):
        if file.is_file():
            recorded = _recorded(file)
            _compare(folder, recorded["settings"], plan.settings)
            if recorded.get("dtype") in get_args(TokenDtype):
                dtype = max(dtype, np.dtype(recorded["dtype"]), key=lambda each: each.itemsize)
            break
    else:
        _check_free(folder)
        write_text(folder / UNFINISHED, json.dumps({"settings": plan.settings}, indent=1))
    plan.tokenizer.save(folder / FILE)
    return dtype


def _check_free(folder: Path) -> None:
    """Raise InputError if the folder holds files of anything but an unfinished corpus."""
    own = (FILE, SETTINGS, *(f"{split}-[0-9]*" for split in SPLITS))
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
    recorded = read_json_object(file, "file of the corpus")
    settings = recorded.get("settings")
    sources = settings.get("sources") if isinstance(settings, dict) else None
    if not isinstance(sources, list) or not all(_is_source(source) for source in sources):
        raise InputError(f"{file} is damaged: delete its folder, or choose another one with --out")
    return recorded


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


def _done(folder: Path, unit: Unit, plan: Plan, dtype: np.dtype[Any]) -> ShardEntry | None:
    """The index entry of a shard of this plan if it is already complete."""
    path = folder / f"{unit.name}.json"
    try:
        described = parse(read_json_object(path, "corpus file"), ShardDocuments, path)
        entry = _entry(path, described)
        described.check(entry)
        size = path.with_suffix(".bin").stat().st_size
    except (OSError, ValueError):
        return None
    names = [document.name for document in unit.documents]
    wanted = (plan.key, names, entry.tokens * dtype.itemsize)
    return entry if (described.plan, described.names, size) == wanted else None


def _entry(path: Path, described: ShardDocuments) -> ShardEntry:
    """The index entry of a shard, whose documents are described in a file."""
    return ShardEntry(
        name=path.stem,
        documents=len(described.names),
        tokens=sum(described.tokens),
        bytes=sum(described.bytes),
        sha256=described.sha256,
        documents_sha256=sha256(path),
    )


class _Order(NamedTuple):
    """The inputs of a worker besides its unit."""

    folder: Path
    newlines: Newlines
    dtype: str
    plan: str
    end_of_text: int | None


def _write_units(
    units: Sequence[Unit], folder: Path, plan: Plan, dtype: np.dtype[Any], workers: int
) -> Iterator[ShardEntry]:
    """The index entry of each shard, as soon as the shard is finished."""
    ended = plan.tokenizer.end_of_text if plan.settings["end_of_text"] else None
    order = _Order(folder, plan.settings["newlines"], dtype.str, plan.key, ended)
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


def _write_unit(unit: Unit, order: _Order) -> ShardEntry:
    tokenizer = _load_tokenizer(order.folder / FILE)
    path = order.folder / f"{unit.name}.bin"
    names, n_tokens, n_bytes = list[str](), list[int](), list[int]()
    digest = TokenHash()

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for document in unit.documents:
                names.append(document.name)
                n_tokens.append(0)
                n_bytes.append(0)
                for tokens in parts(document):
                    numbers = tokens.astype(order.dtype)
                    digest.update(numbers)
                    file.write(numbers.data)
                    n_tokens[-1] += len(tokens)

    def parts(document: Document) -> Iterator[Int[np.ndarray, " length"]]:
        def pieces() -> Iterator[str]:
            for piece in document.pieces(order.newlines):
                n_bytes[-1] += len(utf8(piece))
                yield piece

        yield from encode_pieces(tokenizer, pieces(), document)
        if order.end_of_text is not None:
            yield np.array([order.end_of_text])

    write_atomically(path, write)
    described = ShardDocuments(order.plan, digest.hexdigest(), names, n_tokens, n_bytes)
    path = path.with_suffix(".json")
    # Last: its presence means that the tokens are complete.
    write_text(path, json.dumps(msgspec.to_builtins(described)))
    return _entry(path, described)


_load_tokenizer = lru_cache(maxsize=1)(load_tokenizer)


def _finish(folder: Path, plan: Plan, dtype: np.dtype[Any], done: Mapping[str, ShardEntry]) -> None:
    """Write the index, and delete temporary files."""
    splits: dict[str, list[dict[str, Any]]] = {}
    for unit in plan.units:
        shards = splits.setdefault(unit.name.rpartition("-")[0], [])
        shards.append(msgspec.to_builtins(done[unit.name]))
    index = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": plan.settings["tokenizer"],
        "vocab_size": plan.tokenizer.vocab_size,
        "dtype": dtype.str,
        "settings": plan.settings,
        "splits": splits,
    }
    write_text(folder / INDEX, json.dumps(index, indent=1))
    (folder / UNFINISHED).unlink(missing_ok=True)
    for name in (INDEX, FILE, SETTINGS, UNFINISHED, *(f"{unit.name}.*" for unit in plan.units)):
        for temporary in folder.glob(f".{name}.*"):  # of a process that was killed
            shutil.rmtree(temporary, ignore_errors=True)
