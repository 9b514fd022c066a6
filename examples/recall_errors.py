"""Where trained models err on associative recall: by how far back the pair lies.

Run it: stateline reproduce h3/table_2 --rows "H3, recall" --seeds 0 1 2 3 4 5 6 7 8 9
        python examples/recall_errors.py runs/papers/runs/associative-recall*h3*

A line is a run: its seed, the percentage of wrong answers in all, to keys that occurred several
times, and to keys that occurred once, by the number of pairs between the key and the question.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from stateline.generate import load_run
from stateline.runs.folder import read_run
from stateline.tasks import make_task

BATCHES = 64
BACK = ((0, 2), (3, 5), (6, 9))


@torch.inference_mode()
def main(folders: list[Path]) -> None:
    """Print a line per run."""
    heads = ["all", "several times", *(f"{low} to {high} back" for low, high in BACK)]
    print("seed  " + "  ".join(heads))
    for folder in folders:
        run = read_run(folder)
        assert run is not None, f"{folder} holds no finished run"
        task = make_task(run.task, seed=run.seed + 1)
        drawn = [task.problems(20, index) for index in range(BATCHES)]  # type: ignore[attr-defined]
        prompts, answers = (torch.cat(own) for own in zip(*drawn, strict=True))
        wrong = load_run(folder)[0].eval()(prompts)[:, -1].argmax(1) != answers[:, 0]
        asked = prompts[:, 0:20:2] == prompts[:, -1:]  # which of the ten pairs have the key
        once, back = asked.sum(1) == 1, 9 - asked.int().argmax(1)
        found = [wrong, wrong[~once]]
        found += [wrong[once & (back >= low) & (back <= high)] for low, high in BACK]
        print(f"{run.seed:4}  " + "  ".join(map(shown, found, map(len, heads))))


def shown(wrong: Tensor, width: int) -> str:
    """A percentage."""
    return f"{100 * wrong.float().mean().item():{width}.1f}"


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="+")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args().folders)
