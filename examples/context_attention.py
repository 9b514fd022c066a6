"""How many context states hold the attention of a trained Block-State layer.

Run it: stateline reproduce block_state/attention
        python examples/context_attention.py runs/papers/runs/text*block-state*

A line is a run: over the heads and the tokens of the second half of a block, which see more than
half as many context states as a block has tokens, the mean number of context states that together
hold 90 % of a token's attention, the same if all states had equal weights, and the share that the
50 states with the largest weights hold. With ``--record FILE``, the table of the paper's page.
"""

import argparse
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from stateline.evaluate import evaluate
from stateline.generate import load_run
from stateline.layers import BlockState
from stateline.papers.record import RecordedRow, TableRecord, write_table
from stateline.runs.folder import read_run
from stateline.tasks import make_task
from stateline.train.environment import environment

HELD, MOST = 0.9, 50
COLUMNS = ["states with 90 %", "of equal weights", "share of 50 states (%)"]
BATCHES = 16


def weights(layer: BlockState, x: Tensor) -> Tensor:
    """Attention of tokens to the context states of their block: (..., head, token, state)."""
    q = layer.cross.queries(x).unflatten(1, (-1, layer.window)).transpose(-3, -2)
    k = layer.keys_and_values(layer.context_states(x))[0].transpose(-3, -2)
    later = torch.ones(layer.window, layer.window, dtype=torch.bool).triu(1)
    scores = q @ k.mT / layer.cross.d_head**0.5
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1)


def held(attention: Tensor) -> list[float]:
    """The three figures of a row."""
    largest = attention.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    largest = largest[..., largest.shape[-1] // 2 :, :]
    seen = torch.arange(largest.shape[-1] // 2, largest.shape[-1]) + 1
    states = (largest < HELD).sum(dim=-1) + 1.0
    equal = (HELD * seen).ceil()
    share = 100 * largest[..., MOST - 1]
    return [states.mean().item(), equal.mean().item(), share.mean().item()]


@torch.inference_mode()
def main(given: argparse.Namespace) -> None:
    """Print a line per run, and record the table."""
    rows: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for folder in given.folders:
        run = read_run(folder)
        assert run is not None, f"{folder} holds no finished run"
        model = load_run(folder)[0].eval()
        layer = next(part for part in model.modules() if isinstance(part, BlockState))
        inputs: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, x, into=inputs: into.append(x[0]))
        task = make_task(run.task, seed=run.seed + 1)
        evaluate(model, task, task.train_length, batches=BATCHES)
        hook.remove()
        found = held(weights(layer, torch.cat(inputs)))
        rows[layer.variant.upper()][run.seed] = found
        print(f"{layer.variant.upper()}, seed {run.seed}: ", end="")
        print(", ".join(f"{value:.1f} {of}" for value, of in zip(found, COLUMNS, strict=True)))
    if given.record:
        write_table(given.record, recorded(rows))


def recorded(rows: dict[str, dict[int, list[float]]]) -> TableRecord:
    """The table of all runs."""
    return TableRecord(
        table="",
        size="laptop",
        command="python examples/context_attention.py runs/papers/runs/text*block-state*",
        created=datetime.now(UTC).date().isoformat(),
        environment={**environment()},
        columns=COLUMNS,
        rows=[
            RecordedRow(
                label=label,
                seeds=sorted(found),
                values=[
                    [round(found[seed][column], 2) for seed in sorted(found)]
                    for column in range(len(COLUMNS))
                ],
            )
            for label, found in sorted(rows.items(), reverse=True)
        ],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--record", type=Path)
    main(parser.parse_args())
