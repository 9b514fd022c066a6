"""Run a case in a forked process with limits, and report what it did wrong.

The parent must have imported PyTorch but never computed a gradient: children then start fast and
without threads.
"""

import ctypes
import hashlib
import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.refusals.fuzz.cases import Case

SECONDS = 20
"""Seconds of computing, or of waiting without computing, after which a case counts as hanging."""

MEMORY = 4 << 30
"""Bytes that a case may use beyond those of this process."""

Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Outcome:
    """What a case did.

    Attributes:
        case: The case.
        code: Its exit code; negative for a signal.
        error: What it wrote to standard error.
        faults: What it did that no input may make a command do.
    """

    case: Case
    code: int
    error: str
    faults: list[str]


def run(case: Case, prepared: Path, main: Main) -> Outcome:
    """Run a case in a copy of the prepared folder."""
    with tempfile.TemporaryDirectory() as name:
        folder, texts = Path(name, "folder"), Path(name, "texts")
        shutil.copytree(prepared, folder, symlinks=True)
        texts.mkdir()
        home = Path.cwd()
        os.chdir(folder)
        try:
            case.damage()
            before = snapshot(folder)
            code, hung = _fork(case.arguments, texts, main)
        finally:
            os.chdir(home)
        error = (texts / "err").read_text(errors="replace")
        after = snapshot(folder)
        return Outcome(case, code, error, faults(case, code, hung, error, before, after))


def faults(
    case: Case,
    code: int,
    hung: bool,
    error: str,
    before: dict[str, str],
    after: dict[str, str],
) -> list[str]:
    """What is wrong with an outcome; nothing, if it kept the promise."""
    found = []
    lines = [line for line in error.splitlines() if not line.startswith("state: ")]
    if hung:
        found.append(f"it computed or waited for {SECONDS} seconds")
    elif code < 0:
        found.append(f"signal {signal.Signals(-code).name}")
    elif "Traceback (most recent call last)" in error:
        found.append(f"a traceback: {lines[-1]}")
    elif code == 2:
        if len(lines) != 1 or not lines[0].startswith("stateline: error: "):
            found.append(f"{len(lines)} lines on standard error")
    elif code != 0 and not (code == 1 and case.arguments[0] == "check"):
        found.append(f"exit code {code}")
    if case.refused and code == 0:
        found.append("it was taken")
    out = _out(case.arguments) if code == 0 else None
    changed = [path for path in before if before[path] != after.get(path) and not _below(path, out)]
    if changed:
        found.append(f"changed: {', '.join(changed)}")
    new = [path for path in after if path not in before]
    if code == 2 and new and "new/metrics.jsonl" not in new:  # a run that began can be resumed
        found.append(f"left behind: {', '.join(new)}")
    return found


def _out(arguments: list[str]) -> str | None:
    """The folder that a command writes to."""
    options = [option for option in ("--out", "--save_state") if option in arguments[:-1]]
    return arguments[arguments.index(options[0]) + 1] if options else None


def _below(path: str, folder: str | None) -> bool:
    return folder is not None and Path(path).is_relative_to(folder)


def snapshot(folder: Path) -> dict[str, str]:
    """What is in a folder: kinds, modes, sizes and hashes."""
    return {str(p.relative_to(folder)): _about(p) for p in sorted(folder.rglob("*"))}


def _about(path: Path) -> str:
    status = path.lstat()
    about = f"{status.st_mode:o}"
    if stat.S_ISLNK(status.st_mode):
        return f"{about} {os.readlink(path)}"
    if not stat.S_ISREG(status.st_mode):
        return about
    small = status.st_size < 1 << 24
    return f"{about} {hashlib.sha256(path.read_bytes()).hexdigest() if small else status.st_size}"


def _fork(arguments: list[str], texts: Path, main: Main) -> tuple[int, bool]:
    """The exit code of the command in a child process, and whether it had to be killed."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become(arguments, texts, main)
    used, since = 0, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _kill_group(child)
            code = os.waitstatus_to_exitcode(status)
            return code, code == -signal.SIGXCPU
        now = _computed(child)
        if now != used:
            used, since = now, time.monotonic()
        if time.monotonic() > since + SECONDS:
            _kill_group(child)
            os.waitpid(child, 0)
            return -signal.SIGKILL, True
        time.sleep(0.01)


def _computed(child: int) -> int:
    """A number that grows while a process computes or waits for a core (which is no hang)."""
    state, *rest = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return time.monotonic_ns() if state == "R" else int(rest[10]) + int(rest[11])


def _kill_group(child: int) -> None:
    """End the child and the workers that it left."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def _become(arguments: list[str], texts: Path, main: Main) -> None:
    """In the child: run the command as the installed script does, then exit."""
    code = 1
    try:
        os.setsid()
        for number, name in ((0, os.devnull), (1, texts / "out"), (2, texts / "err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
        _limit()
        code = main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _limit() -> None:
    """Limit memory, file sizes and core dumps; give up the rights of root over files."""
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_DATA, used + MEMORY),  # not what is reserved only, as charts do
        (resource.RLIMIT_FSIZE, 1 << 30),
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = limit + (kind == resource.RLIMIT_CPU)  # one second after SIGXCPU comes SIGKILL
        resource.setrlimit(kind, (limit, hard))
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of capset; this process
    ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())
