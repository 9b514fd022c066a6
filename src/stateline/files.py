"""Reading files with checks, and writing them so that no reader ever sees half of one."""

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from stateline.errors import InputError, reason

PACKED = (".bz2", ".gz", ".parquet", ".xz", ".zip", ".zst")
"""Ends of names of files whose bytes are not those of their text."""


def regular_file(path: str | Path, what: str) -> Path:
    """Check that a file can be read before it is opened.

    Opening a FIFO blocks until someone writes to it, and ``/dev/zero`` never ends: both are refused
    here, as are folders, sockets and broken links.

    Args:
        path: Where the file is; ``~`` and ``~user`` are expanded.
        what: What it holds, for the message: ``"tokenizer"``.

    Returns:
        The path with ``~`` expanded.

    Raises:
        InputError: If it does not exist, is no regular file, or may not be read; or if no file can
            have this name.
    """
    try:
        found = Path(path).expanduser()
        mode = found.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:  # also NUL, and ~user without a home
        raise _cannot_read(path, what, reason(error)) from error
    if not stat.S_ISREG(mode):
        raise _cannot_read(path, what, f"it is {_KINDS.get(stat.S_IFMT(mode), 'a device')}")
    if not os.access(found, os.R_OK):
        raise _cannot_read(path, what, os.strerror(errno.EACCES))
    return found


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


_ON_A_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Form of the name of a published model, such as ``state-spaces/mamba-130m``."""


def text_file(path: str | Path, what: str) -> Path:
    """Check that a file can be read, as :func:`regular_file` does, and that it is not packed.

    Raises:
        InputError: Also if its name ends as that of a packed file.
    """
    found = regular_file(path, what)
    if found.suffix.lower() in PACKED:
        raise InputError(f"the {what} {found} is packed, so its bytes are no text: unpack it first")
    return found


def user_path(path: str | Path, what: str) -> Path:
    """A path that the user gave, with ``~`` expanded.

    Args:
        path: The path; it need not exist.
        what: What it should lead to, for messages.

    Raises:
        InputError: If no file can have that name, the home folder of ``~user`` is unknown, links
            form a loop, or a folder of the path cannot be read.
    """
    try:
        expanded = Path(path).expanduser()
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        return expanded
    except (OSError, RuntimeError, ValueError) as error:
        why = f"cannot read the {what} {path}: {reason(error)}; give another path"
        raise InputError(why) from error
    return expanded


def model_path(path: str | Path) -> Path:
    """The folder of a model, or the file with its weights, with ``~`` expanded.

    Raises:
        InputError: If it does not exist, or cannot be read.
    """
    found = user_path(path, "model")
    if found.exists():
        return found
    line = f"no model in {path}: there is no such folder here; give the folder of a model"
    if _ON_A_HUB.fullmatch(str(path)):
        line += f", or get it by hf download {path} --local-dir FOLDER"
    raise InputError(line)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, then rename it.

    Args:
        path: The file to write. An older file stays as it is until the new one is complete.
        write: Writes the file at the path that it is given.

    Raises:
        InputError: If the folder cannot be written to, or the disk is full. Nothing is left behind.
    """
    with _beside(path) as folder:
        temporary = folder / path.name
        write(temporary)
        _open_to_others(temporary)
        sync(temporary)
        os.replace(temporary, path)


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Fill a folder under a temporary name, then rename it.

    Args:
        path: The folder to write. An older folder of that name is removed just before.
        write: Fills the folder at the path that it is given.

    Raises:
        InputError: If it cannot be written, or the disk is full. Nothing is left behind.
    """
    with _beside(path) as temporary:
        write(temporary)
        for file in (*temporary.iterdir(), temporary):
            _open_to_others(file)
            sync(file)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)


def _open_to_others(path: Path) -> None:
    """Give a file or folder the permissions of a new one: some libraries write files for one user.

    While the process's mask is read, it is the strictest.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary folder beside a path; an error in writing becomes an ``InputError``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error
    try:
        yield temporary
    except (OSError, SafetensorError, InputError) as error:
        cause = error.__cause__ if isinstance(error, InputError) else error
        if not isinstance(cause, OSError | SafetensorError):
            raise
        raise cannot_write(path, cause) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def check_writable(path: Path) -> None:
    """Check that a file can be written before work is spent on its contents; creates nothing.

    Raises:
        InputError: If the path is a folder, or no file can be created there.
    """
    parts = path.absolute()
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        above = next(parent for parent in parts.parents if os.path.lexists(parent))
        longest = max(parts.parts[len(above.parts) :], key=len)  # a name may be too long
        with tempfile.NamedTemporaryFile(dir=above, prefix=f".{longest}."):
            pass
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a folder.

    Missing folders are made, and removed at the end if they are still empty. The lock is on the
    folder itself and ends with its process. Without locks in the file system, nothing is checked.

    Raises:
        InputError: If another process writes the folder, or it cannot be made.
    """
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except (OSError, ValueError) as error:
        raise cannot_write(folder, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise InputError(
            f"another process writes {folder}: wait until it has ended, or choose another folder"
        ) from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        os.close(handle)


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file.

    Raises:
        InputError: If it cannot be written.
    """

    def open_at_once(name: str, flags: int) -> int:  # without waiting for the reader of a pipe
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0), 0o666)

    try:
        with open(path, "a", encoding="utf-8", opener=open_at_once) as file:
            file.write(f"{line}\n")
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename never points to missing data."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_read(path: str | Path, what: str, why: str) -> InputError:
    return InputError(f"cannot read the {what} {path}: {why}; give a regular file that can be read")


def cannot_write(path: Path, error: BaseException) -> InputError:
    """The error that says why a file or folder could not be written."""
    return InputError(f"cannot write {path}: {reason(error)}; choose another folder")


JSON_BYTES = 1 << 26
"""Upper limit on the size of a JSON file."""


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed_file(folder: Path, hashes: Mapping[str, str]) -> str:
    """The name of the first file whose SHA-256 hash differs; empty if none does.

    Raises:
        InputError: If one cannot be read.
    """
    for name, wanted in hashes.items():
        if not _has_hash(regular_file(folder / Path(name).name, "file"), wanted):
            return name
    return ""


def _has_hash(path: Path, wanted: str) -> bool:
    """True if a file has this hash.

    A JSON file larger than ``JSON_BYTES``, or a safetensors file whose header does not fit its
    size, cannot be what was written: it is not read.
    """
    if path.suffix == ".json" and path.stat().st_size > JSON_BYTES:
        return False
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError:
            return False
    return sha256(path) == wanted


def read_text(path: Path, what: str, *, max_bytes: int | None = None) -> str:
    """Read a text file in UTF-8.

    Args:
        path: The file.
        what: What it is, for messages: ``"model configuration"``.
        max_bytes: Larger files are refused before they are read.

    Raises:
        InputError: If there is no regular file, or it is too large, unreadable or not UTF-8.
    """
    path = regular_file(path, what)
    if max_bytes is not None and (size := path.stat().st_size) > max_bytes:
        raise InputError(f"the {what} {path} must have at most {max_bytes:,} bytes, got {size:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"the {what} {path} is damaged: it is not UTF-8 text") from error
    except OSError as error:
        raise _cannot_read(path, what, reason(error)) from error


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file, whose value may be of any type; see :func:`read_text`.

    Raises:
        InputError: If it cannot be read, is not JSON, or is nested too deeply.
    """
    return parse_json(read_text(path, what, max_bytes=JSON_BYTES), f"{what} {path}")


def read_json_object(path: Path, what: str, *, max_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Read a JSON file that holds an object, as :func:`read_json` does."""
    return parse_json_object(read_text(path, what, max_bytes=max_bytes), f"{what} {path}")


def integer_of_json(digits: str) -> int:
    """An integer of a JSON text; for ``parse_int`` of ``json.loads``.

    Raises:
        ValueError: If it is larger than any float.
    """
    if len(digits) > 300:
        raise ValueError(f"it has an integer of {len(digits)} digits")
    return int(digits)


def parse_json(text: str, what: str) -> Any:
    """Parse a JSON text.

    Raises:
        InputError: If it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_int=integer_of_json)
    except RecursionError as error:
        raise InputError(f"the {what} is nested too deeply") from error
    except ValueError as error:  # also numbers of thousands of digits
        raise InputError(f"the {what} is not JSON: {error}") from error


def parse_json_object(text: str, what: str) -> dict[str, Any]:
    """Parse the JSON text of an object, as :func:`parse_json` does."""
    value = parse_json(text, what)
    if not isinstance(value, dict):
        raise InputError(f"the {what} must be a JSON object, got a {type(value).__name__}")
    return value


YAML_BYTES, YAML_DEPTH = 1 << 20, 16
"""Upper limits on the size of a YAML file of settings, and on its nesting."""


def read_yaml(path: str | Path, what: str) -> Any:
    """The content of a YAML file of settings; see :func:`read_text`.

    Raises:
        InputError: If it is not YAML, is too large or nested too deeply, has aliases, or has a key
            that is not text or is given twice.
    """
    text, depth = read_text(Path(path), what, max_bytes=YAML_BYTES), 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise InputError(f"the {what} {path} must not use YAML aliases: write it out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > YAML_DEPTH:
                raise InputError(f"the {what} {path} must have at most {YAML_DEPTH} nested levels")
        content = yaml.load(text, Loader=_YamlLoader)  # a SafeLoader
    except InputError:
        raise
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"the {what} {path} is not valid YAML: {reason(error)}") from error
    _check_keys(f"{what} {path}", content)
    return content


def to_yaml(content: Any) -> str:
    """Plain data as YAML, from which :func:`read_yaml` reads the same data."""
    text: str = yaml.dump(content, Dumper=_YamlDumper, allow_unicode=True, sort_keys=False)
    return text


def finite(value: Any) -> Any:
    """Plain data for JSON, in which numbers that are not finite are ``None``."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _YamlLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Reads ``4e-3`` as a number and refuses a name that is given twice, as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [name for name, times in names.items() if times > 1]:
            raise ValueError(f"{twice[0]} is given twice in one mapping; leave one out")
        return super().construct_mapping(node, deep)


class _YamlDumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Quotes the text ``4e-3``, which would otherwise be read as a number."""


for _kind in (_YamlLoader, _YamlDumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )


def _check_keys(where: str, content: Any) -> None:
    if isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(key, str):
                raise InputError(f"names in the {where} must be text, got {key!r}")
            _check_keys(where, value)
    elif isinstance(content, list):
        for value in content:
            _check_keys(where, value)
