"""Loss of a trained model right after attention was replaced: by nothing, new or started layers.

Run it: python examples/starts_table.py WIKITEXT/valid.txt WIKITEXT/test.txt models/smollm2

Layers are replaced one at a time, and all at once, by each kind of recurrence. Started layers take
the heads of the old ones where they can, and their last maps are fitted on the first text; the loss
is that of rows of the second one. Shown is its rise, with the standard error over these rows. Rows
begin with the token that the model reads before a text, if there is one.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stateline.generate.runs import load_run
from stateline.layers.compose import Branch
from stateline.models.language_model import LanguageModel
from stateline.models.likelihood import token_losses
from stateline.models.starts import fit_outputs, replaced, take_heads
from stateline.papers.record import RecordedRow, TableRecord, write_table
from stateline.probe.network import StatelineNetwork, silenced
from stateline.runs.initial import new_tensors
from stateline.train.environment import environment

KINDS = {
    "linear_attention": "linear_attention(n_heads={n}, d_head={d})",
    "retention": "retention(n_heads={n}, expand_v={wide})",
    "gated_linear_attention": (
        "gated_linear_attention(n_heads={n}, expand_k={wide}, expand_v={wide})"
    ),
    "gated_delta_net": "gated_delta_net(n_heads={n}, d_key={d}, expand_v=1)",
    "kimi_delta_attention": "kimi_delta_attention(n_heads={n}, d_head={d})",
    "rwkv7": "rwkv7(n_heads={n}, d_head={d})",
    "mamba2": "mamba2(n_groups={n}, d_head={d}, d_state={d}, expand={wide}) feed_forward",
    "h3": "h3",
    "s4d": "s4d",
}
"""A recurrence with as many heads of the same width as attention, where it has such heads."""

FITTED = 64
"""Rows of the first text, of which as many are read as the fit needs."""

Rises = list[float]
"""How far the loss of each row has risen, in nats per token."""


@contextmanager
def as_before(pairs: Sequence[tuple[int, Branch, Branch]]) -> Iterator[None]:
    """Leave layers of a student as they are in its teacher."""
    with ExitStack() as undo:
        for _, branch, other in pairs:
            undo.callback(setattr, branch, "layer", branch.layer)
            branch.layer = other.layer
        yield


class Measured:
    """The loss of rows of text after some layers of a model were replaced.

    Args:
        model: The model.
        rows: The rows of text.
        blocks: Numbers of the blocks in which one layer at a time is replaced.
    """

    def __init__(self, model: LanguageModel, rows: Tensor, blocks: Sequence[int]) -> None:
        self.network, self.rows, self.blocks = StatelineNetwork(model), rows, blocks
        self.streams = dict[int, list[Tensor]]()
        for row in rows.split(1):
            for block, stream in enumerate(model.streams(row[:, :-1])):
                if block in (0, *blocks):
                    self.streams.setdefault(block, []).append(stream)
        self.whole = torch.zeros(len(rows))
        self.whole = torch.tensor(self.rises(self.network, 0))

    def rises(self, network: StatelineNetwork, block: int) -> Rises:
        """The rise of the loss of a model that is the same up to a block."""
        asked, found = torch.ones_like(self.rows[:1, 1:], dtype=torch.bool), list[Tensor]()
        for row, stream in zip(self.rows.split(1), self.streams[block], strict=True):
            logits = network.finish(block, stream, row[:, :-1], asked)
            found.append(token_losses(logits, row[0, 1:]).mean())
        return (torch.stack(found) - self.whole).tolist()

    def without(self, blocks: Sequence[int]) -> Rises:
        """The rise without the mixers of some blocks."""
        with ExitStack() as silent:
            for block in blocks:
                heads = self.network.mixers[block]
                none = torch.zeros(1, sum(group.number for group in heads))
                silent.enter_context(silenced(heads, none))
            return self.rises(self.network, blocks[0] if len(blocks) == 1 else 0)

    def replaced(self, own: LanguageModel, fitted: Sequence[Tensor] = ()) -> list[Rises]:
        """The mean rise with single layers of a student, and the rise with all.

        Args:
            own: The student.
            fitted: Text on which last maps are fitted before.
        """

        def rise(block: int) -> Rises:
            if fitted:
                fit_outputs(own, self.network.model, fitted)
            return self.rises(StatelineNetwork(own), block)

        pairs, single = [*replaced(own, self.network.model)], list[Rises]()
        for block in self.blocks:
            with as_before([pair for pair in pairs if pair[0] != block]):
                single.append(rise(block))
        return [mean(single), rise(0)]


def mean(lists: Sequence[Rises]) -> Rises:
    """The mean of each place over some lists."""
    return [statistics.fmean(values) for values in zip(*lists, strict=True)]


def student(model: LanguageModel, kind: str) -> LanguageModel:
    """A model with a new layer of a kind in the place of each mixer."""
    old = next(heads for heads in StatelineNetwork(model).mixers if heads)[0]
    wide = old.number * old.width / model.d_model
    layer = KINDS[kind].format(n=old.number, d=old.width, wide=wide)
    count = len([heads for heads in StatelineNetwork(model).mixers if heads])
    config = replace(model.config, pattern=f"({layer})*{count}")
    own, new = LanguageModel(config).eval(), new_tensors(config, model.config)
    weights = model.state_dict()
    kept = {name: weights[name] for name in own.state_dict() if name not in new}
    own.load_state_dict(kept, strict=False)
    return own


@torch.inference_mode()
def main(given: argparse.Namespace) -> None:
    """Measure all kinds in all models, and write the table after each."""
    rows = list[RecordedRow]()
    for folder in given.models:
        model, tokenizer = load_run(folder, dtype=torch.float32)
        tokens = [tokenizer.encode(path.read_text()) for path in given.texts]
        cut = partial(rows_of, length=given.length, beginning=tokenizer.beginning)
        scored = cut(tokens[1], n=given.rows)
        mixers = [b for b, heads in enumerate(StatelineNetwork(model).mixers) if heads]
        blocks = [mixers[layer] for layer in given.alone]
        measured = Measured(model, scored, blocks)
        texts, name = list(range(given.rows)), Path(folder).name
        print(f"{name}: {show(measured.whole.tolist())}")
        none = [mean([measured.without([b]) for b in blocks]), measured.without(mixers)]
        rows.append(RecordedRow(label=f"{name}, none", seeds=texts, values=none))
        print(f"  none  {show(none[0])}  {show(none[1])}", flush=True)
        for kind in given.kinds:
            torch.manual_seed(0)
            own = student(model, kind)
            new = measured.replaced(own)
            take_heads(own, model)
            started = measured.replaced(own, cut(tokens[0], n=FITTED).split(4))
            for start, values in (("new", new), ("started", started)):
                rows.append(
                    RecordedRow(label=f"{name}, {kind}, {start}", seeds=texts, values=values)
                )
                print(f"  {kind}, {start}  {show(values[0])}  {show(values[1])}", flush=True)
            if given.out:
                write_table(given.out, record(rows, given))


def rows_of(tokens: Sequence[int], length: int, beginning: Sequence[int], n: int) -> Tensor:
    """Rows of tokens, evenly spread over a text, behind what the model reads before a text."""
    width = length + 1 - len(beginning)
    rows = torch.tensor(tokens[: len(tokens) // width * width]).view(-1, width)
    chosen = rows[torch.linspace(0, len(rows) - 1, min(len(rows), n)).long()]
    return torch.cat([torch.tensor(beginning, dtype=torch.long).expand(len(chosen), -1), chosen], 1)


def record(rows: list[RecordedRow], given: argparse.Namespace) -> TableRecord:
    """All rises, as a table."""
    texts = " ".join(f"WIKITEXT/{path.name}" for path in given.texts)
    names = f"{texts} {' '.join(f'models/{Path(folder).name}' for folder in given.models)}"
    options = f"--rows {given.rows} --length {given.length} --kinds {' '.join(given.kinds)}"
    return TableRecord(
        table="",
        size="laptop",
        command=f"python examples/starts_table.py {names} {options}",
        created=datetime.now(UTC).date().isoformat(),
        environment={**environment()},
        columns=["one layer", "all layers"],
        rows=rows,
        lower=["one layer", "all layers"],
        note="rise of the loss in nats per token; a seed is a row of text; new weights have seed 0",
    )


def show(values: Sequence[float]) -> str:
    """Mean and standard error."""
    return (
        f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"
    )


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", type=Path, nargs=2, help="of which the second is scored")
    parser.add_argument("models", nargs="+", help="folders of models")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--alone", type=int, nargs="+", default=[5, 16], help="layers")
    parser.add_argument("--rows", type=int, default=8, help="rows that are scored")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--out", type=Path, help="file for the table")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
