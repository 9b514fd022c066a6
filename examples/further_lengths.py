"""Score the trained models of a comparison at lengths that it did not score.

Run it: python examples/further_lengths.py runs/recall runs/recall-4k 4096 --batches 1

The second folder gets the results with the further scores; `stateline report runs/recall-4k
--budget "state@4096<=64KiB"` decides on them. With fewer batches of problems than a comparison
scores, all scores are taken to be as uncertain as the further ones.
"""

import argparse
import shlex
from pathlib import Path

from msgspec.structs import replace

from stateline.reports import read_results
from stateline.runs.evaluate import evaluate_run
from stateline.runs.folder import stored_run
from stateline.runs.results import Results
from stateline.runs.score import EVAL_BATCHES
from stateline.runs.store import write_results


def scored(folder: Path, lengths: list[int], batches: int) -> Results:
    """The results of a comparison, with scores at further lengths."""
    results, found = read_results(folder), {}
    wanted = {(run.model, run.task, run.seed) for run in results.runs}
    for place in sorted((folder / "runs").iterdir()):
        run = stored_run(place)
        if run is not None and (run.model, run.task, run.seed) in wanted:  # no trial
            scores = evaluate_run(place, lengths=lengths, batches=batches).scores
            found[run.model, run.task, run.seed] = scores
            print(f"{run.model} seed {run.seed}: {scores}", flush=True)
    return replace(
        results,
        tasks=[
            replace(
                task,
                eval_lengths=sorted({*task.eval_lengths, *lengths}),
                problems=task.problems * min(batches, EVAL_BATCHES) // EVAL_BATCHES,
            )
            for task in results.tasks
        ],
        runs=[
            replace(run, by_length=run.by_length | found[run.model, run.task, run.seed])
            for run in results.runs
        ],
    )


def main(folder: Path, out: Path, lengths: list[int], batches: int) -> None:
    """Score, and write the results."""
    results = scored(folder, lengths, batches)
    own = ["examples/further_lengths.py", str(folder), str(out), *map(str, lengths)]
    own += ["--batches", str(batches)]
    results = replace(results, command=f"{results.command}\npython {shlex.join(own)}")
    out.mkdir(parents=True, exist_ok=True)
    write_results(out, results)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("out", type=Path)
    options.add_argument("lengths", type=int, nargs="+")
    options.add_argument("--batches", type=int, default=EVAL_BATCHES)
    main(**vars(options.parse_args()))
