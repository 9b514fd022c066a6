"""Give the command line wrong inputs: ``python -m tests.refusals.fuzz --count 300 --seed 0``.

A case depends only on the seed and its number, so it can be run again alone:
``python -m tests.refusals.fuzz --seed 0 --case 17``. With ``--serve``, standard input names
one case per line, and each is answered by a line of JSON.
"""

import argparse
import json
import os
import pkgutil
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork has one thread

import torch

import stateline
from stateline.cli import main as stateline_main
from tests.prepared import prepare, prepare_more
from tests.refusals.fuzz.cases import Case, case
from tests.refusals.fuzz.fixed import FIXED, WORKS
from tests.refusals.fuzz.run import Outcome, run


def main() -> int:
    """Run what is asked for; 1 if an input was not refused as promised."""
    parser = argparse.ArgumentParser(prog="python -m tests.refusals.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="what the cases are drawn from")
    parser.add_argument("--case", help="only this one: a number, or the name of a fixed example")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--serve", action="store_true", help="answer requests on standard input")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(stateline.__path__, "stateline."):
        with suppress(ImportError):  # a backend that cannot run here
            import_module(module.name)
    with prepared_folder() as prepared:
        if given.serve:
            return serve(prepared)
        if given.case is not None:
            return show(run(named(given.case, given.seed), prepared, stateline_main))
        return run_all(prepared, given.count, given.seed, given.jobs)


@contextmanager
def prepared_folder() -> Iterator[Path]:
    """A folder with one of everything, filled by another process: this one must stay fresh."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name, "prepared")
        folder.mkdir()
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            with Path(name, "log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                prepare()
                prepare_more()
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"the folder could not be prepared: {Path(name, 'log').read_text()}")
        yield folder


def named(name: str, seed: int) -> Case:
    """A case by its number, a fixed one by its name, or a command that works as ``works:N``."""
    if name.startswith("works:"):
        return Case("a command that works", shlex.split(WORKS[int(name[6:])]))
    return FIXED[name] if name in FIXED else case(seed, int(name))


def serve(prepared: Path) -> int:
    """Answer requests such as ``{"case": "17", "seed": 0}``."""
    for line in sys.stdin:
        asked = json.loads(line)
        outcome = run(named(asked["case"], asked["seed"]), prepared, stateline_main)
        print(json.dumps(as_dict(outcome)), flush=True)
    return 0


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """For JSON."""
    told = {"title": outcome.case.title, "command": outcome.case.command}
    return {**told, "code": outcome.code, "error": outcome.error[-4000:], "faults": outcome.faults}


def show(outcome: Outcome) -> int:
    """Print one outcome."""
    print(json.dumps(as_dict(outcome), indent=1))
    print(outcome.error)
    return int(bool(outcome.faults))


def run_all(prepared: Path, count: int, seed: int, jobs: int) -> int:
    """All fixed examples and the cases of a seed; prints a line for each broken promise."""
    begin = time.monotonic()
    names = [*FIXED, *map(str, range(count))]
    outcomes = list(_in_parallel(prepared, names, seed, jobs))
    codes = Counter(outcome["code"] for outcome in outcomes)
    faulty = sum(bool(outcome["faults"]) for outcome in outcomes)
    print(
        f"{len(outcomes)} wrong inputs, {len(FIXED)} of them fixed examples, from seed {seed}: "
        f"{codes[2]} refused, {codes[0]} taken, {faulty} broke the promise "
        f"({time.monotonic() - begin:.0f} s)"
    )
    return int(faulty > 0 or len(outcomes) < len(names))


def _in_parallel(
    prepared: Path, names: list[str], seed: int, jobs: int
) -> Iterator[dict[str, Any]]:
    """Outcomes of cases; each job is a process that forks for its share of them."""
    files = [prepared.parent / f"job-{job}" for job in range(jobs)]
    for job, path in enumerate(files):
        if os.fork() == 0:
            with path.open("w") as file:
                for name in names[job::jobs]:
                    outcome = run(named(name, seed), prepared, stateline_main)
                    file.write(json.dumps(as_dict(outcome)) + "\n")
                    _tell(name, outcome)
            os._exit(0)
    for _ in files:
        os.wait()
    for path in files:
        yield from map(json.loads, path.read_text().splitlines())


def _tell(name: str, outcome: Outcome) -> None:
    """A line for a case that broke the promise."""
    if outcome.faults:
        told = f"{outcome.case.title}: {outcome.case.command[:200]!r}: {'; '.join(outcome.faults)}"
        print(f"{name}: {told[:600]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
