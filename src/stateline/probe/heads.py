"""Which heads retrieve: what a model loses when one head's output is zero.

Forward passes only. A head is silenced in its layer, and only the layers from there on run again;
the heads of a layer are rows of one batch.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.files import check_writable, sole_writer, write_text
from stateline.models.likelihood import token_losses
from stateline.probe.ablations import (
    FILE,
    Ablation,
    Ablations,
    Loss,
    Unit,
    no_ablations,
    read_heads,
)
from stateline.probe.load import fingerprint
from stateline.probe.material import Material
from stateline.probe.network import Heads, Network, silenced
from stateline.probe.reader import Reader
from stateline.probe.tasks import PROBES, check_length, make_examples
from stateline.runs.results import to_json
from stateline.tasks import make_task
from stateline.tasks.base import IGNORE, Batch

RETRIEVES = 0.1
"""Share of right answers below which a ranking of heads is said to say little."""


class Question(NamedTuple):
    """What is measured.

    Attributes:
        task: Name of a probe, or a task such as ``copying(max_len=15)``.
        length: Length, in the unit of the task.
        unit: What is silenced at a time.
        examples: Number of examples.
        rows: Examples that are read at a time, each once for every head of a layer.
        seed: Seed of the examples.
        windows: For ``unit="windows"``, how many positions a head sees at most.
    """

    task: str
    length: int
    unit: Unit = "heads"
    examples: int = 64
    rows: int = 16
    seed: int = 0
    windows: tuple[int, ...] = ()


def answered(reader: Reader, asked: Question, material: Material) -> Batch:
    """The examples with their answers; only the tokens of the answers are targets.

    Shorter rows are filled at the end, which changes nothing in a causal model.

    Raises:
        InputError: If the task is neither a probe nor one that asks for tokens.
    """
    if asked.task not in PROBES:
        return _of_task(asked)
    check_length(asked.task, asked.length, asked.examples)
    drawn = make_examples(
        asked.task,
        asked.length,
        asked.examples,
        material=material,
        encode=reader.encode,
        decode=reader.decode,
        seed=str(asked.seed),
    )
    pairs = [(reader.prompt(e.prompt), reader.encode(e.continuation)) for e in drawn]
    width = max(len(prompt) + len(answer) for prompt, answer in pairs) - 1
    tokens = torch.zeros(len(pairs), width, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORE)
    for row, (prompt, answer) in enumerate(pairs):
        text = torch.tensor([*prompt, *answer])
        tokens[row, : len(text) - 1] = text[:-1]
        targets[row, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
    return Batch(tokens, targets)


def _of_task(asked: Question) -> Batch:
    task, batches = make_task(asked.task, seed=asked.seed), list[Batch]()
    while sum(len(batch.tokens) for batch in batches) < asked.examples:
        batches.append(task.right_answers(asked.length, len(batches)))
    tokens, targets = (torch.cat(parts)[: asked.examples] for parts in zip(*batches, strict=True))
    return Batch(tokens, targets)


Scores = Float[Tensor, "2 rows"]
"""Of each row: whether the answer is exact, and its negative log-likelihood."""


class Examples:
    """Examples in batches, and the stream of each before the present layer.

    Args:
        network: The model.
        batch: The examples.
        rows: Rows of a batch.
    """

    def __init__(self, network: Network, batch: Batch, rows: int) -> None:
        self.network, device = network, network.device
        parts = zip(batch.tokens.split(rows), batch.targets.split(rows), strict=True)
        self.batches = [(tokens.to(device), targets.to(device)) for tokens, targets in parts]
        self.streams = [network.enter(tokens) for tokens, _ in self.batches]

    def advance(self, layer: int) -> None:
        """Read the examples with the next layer."""
        pairs = zip(self.streams, self.batches, strict=True)
        self.streams = [self.network.advance(layer, x, tokens) for x, (tokens, _) in pairs]

    def scores(
        self, layer: int, kept: Sequence[Tensor], window: int = 0
    ) -> Float[Tensor, "variant 2 example"]:
        """Scores of the variants of a layer; each keeps some of the heads.

        The other heads are silent, or see as many positions as the window.
        """
        parts = zip(self.streams, self.batches, strict=True)
        found = [self._batch(layer, x, *batch, kept, window) for x, batch in parts]
        return torch.cat(found, dim=2)

    def _batch(
        self,
        layer: int,
        stream: Tensor,
        tokens: Tensor,
        targets: Tensor,
        kept: Sequence[Tensor],
        window: int,
    ) -> Float[Tensor, "variant 2 rows"]:
        near = self.network.within(layer, window, stream, tokens) if window else ()
        others = [_repeated(x, len(kept)) for x in near]
        stream, tokens, targets = (_repeated(x, len(kept)) for x in (stream, tokens, targets))
        masks = torch.stack(list(kept)).repeat_interleave(len(tokens) // len(kept), dim=0)
        asked = targets != IGNORE
        with silenced(self.network.mixers[layer], masks.to(stream), others):
            logits = self.network.finish(layer, stream, tokens, asked)
        wanted = targets[asked]
        losses = torch.zeros(asked.shape, device=asked.device)
        losses[asked] = token_losses(logits, wanted).to(losses)
        right = asked.logical_not()
        right[asked] = logits.argmax(dim=-1) == wanted
        scores = torch.stack([right.all(dim=1).to(losses), losses.sum(dim=1)])
        return scores.unflatten(1, (len(kept), -1)).transpose(0, 1).cpu()


def _repeated(x: Tensor, times: int) -> Tensor:
    return x.repeat(times, *(1,) * (x.dim() - 1))


def variants(count: int, unit: Unit) -> list[tuple[int, Tensor]]:
    """The number of each head, and which heads are kept without it.

    Example:
        >>> [(head, kept.tolist()) for head, kept in variants(2, "heads")]
        [(0, [0.0, 1.0]), (1, [1.0, 0.0])]
    """
    if unit == "layers":
        return [(-1, torch.zeros(count))]
    return list(enumerate(1 - torch.eye(count)))


def _changed(groups: Sequence[Heads], unit: Unit) -> list[tuple[int, Tensor]]:
    """The variants of a layer that are measured."""
    found = variants(sum(heads.number for heads in groups), unit)
    if unit != "windows":
        return found if groups else []
    near = [heads.attention is not None for heads in groups for _ in range(heads.number)]
    return [one for one, sees_fewer in zip(found, near, strict=True) if sees_fewer]


def forecast(
    network: Network, seconds: float, unit: Unit, done: int = 0, windows: Sequence[int] = ()
) -> float:
    """Seconds that remain, from those of one pass over all examples."""
    total = len(network.mixers)
    counts = [len(_changed(groups, unit)) for groups in network.mixers]
    passes = [count * (total - i) / total for i, count in enumerate(counts) if count]
    return seconds * max(1, len(windows)) * sum(passes[done:])


def ablate(
    network: Network,
    examples: Examples,
    begun: Ablation,
    windows: Sequence[int] = (),
    *,
    tell: Callable[[float], object] = lambda _: None,
) -> Iterator[Ablation]:
    """Silence one head after the other; yields the results after each layer.

    Args:
        network: The model.
        examples: The examples, at the first layer.
        begun: Results so far; layers in them are not measured again.
        windows: How many positions a head sees in place of none.
        tell: Called with the forecast, in seconds.

    Raises:
        InputError: If no head can see fewer positions.
    """
    mixers = [index for index, heads in enumerate(network.mixers) if heads]
    layers = [index for index in mixers if _changed(network.mixers[index], begun.unit)]
    if not layers:
        raise InputError(
            "windows are those of attention and sliding_attention without blocks, got a model "
            "with neither, or one of transformers: leave out --windows, or hf:"
        )
    before, start = begun.seconds, time.perf_counter()
    (whole,) = examples.scores(mixers[0], [torch.ones(_count(network, mixers[0]))])
    tell(forecast(network, time.perf_counter() - start, begun.unit, begun.done, windows))
    match, nats = whole.mean(dim=1).tolist()
    found = msgspec.structs.replace(begun, match=match, nats=nats, layers=len(layers))
    for index in range(len(network.mixers)):
        if index in layers[begun.done :]:
            kinds = _changed(network.mixers[index], begun.unit)
            losses = [
                _loss(mixers.index(index), head, window, whole, without)
                for window in windows or (0,)
                for (head, _), without in zip(
                    kinds, examples.scores(index, [kept for _, kept in kinds], window), strict=True
                )
            ]
            seconds = before + time.perf_counter() - start
            losses = [*found.losses, *losses]
            found = msgspec.structs.replace(found, losses=losses, seconds=seconds)
            yield found
        examples.advance(index)


def _count(network: Network, layer: int) -> int:
    return sum(heads.number for heads in network.mixers[layer])


def _loss(layer: int, head: int, window: int, whole: Scores, without: Scores) -> Loss:
    """Means and standard errors of the paired differences.

    That of the match is not below the error of a share of 1 in n + 2, for no answer may have
    changed.
    """
    fall = torch.stack([whole[0] - without[0], without[1] - whole[1]]).double()
    n = fall.shape[1]
    errors = fall.std(dim=1) / math.sqrt(n) if n > 1 else torch.zeros(2)
    (match, nats), (match_error, nats_error) = fall.mean(dim=1).tolist(), errors.tolist()
    match_error = max(match_error, math.sqrt((n + 1) / n) / (n + 2))
    return Loss(
        layer=layer,
        head=head,
        window=window,
        match=match,
        match_error=match_error,
        nats=nats,
        nats_error=nats_error,
    )


def probe_heads(
    model: str,
    questions: Sequence[Question],
    material: Material,
    load: Callable[[str], Reader],
    folder: Path,
    *,
    settings: Sequence[str | None] = (),
    command: str = "",
    tell: Callable[[str], object] = lambda _: None,
) -> Ablations:
    """Measure which heads of a model retrieve, and write ``heads.json`` after each layer.

    Args:
        model: Name of the model, as ``load`` takes it.
        questions: What to measure; what the folder holds already is not measured again.
        material: Names, documents and questions.
        load: Reads the model.
        folder: Folder of ``heads.json``.
        settings: How ``load`` reads it, such as in which precision; others are measured again.
        command: How to produce the results again.
        tell: Called with lines that tell how far it is.

    Raises:
        InputError: If something cannot be read or written; measured layers are kept.
    """
    check_writable(folder / FILE)
    with sole_writer(folder):
        results = read_heads(folder) if (folder / FILE).exists() else no_ablations(command)
        reader: Reader | None = None
        for asked in questions:
            key = _key(model, asked, material, settings)
            known = [one for one in results.found if one.key == key]
            if known and known[0].done == known[0].layers:
                tell(f"{model}  {asked.task} {asked.length}: measured before")
                continue
            reader = load(model) if reader is None else reader
            network, batch = reader.network(), answered(reader, asked, material)
            begun = known[0] if known else _begin(model, asked, key, len(batch.tokens))
            others = [one for one in results.found if one.key != key]
            with torch.inference_mode():
                examples = Examples(network, batch, asked.rows)
                for found in ablate(
                    network, examples, begun, asked.windows, tell=lambda s: tell(_about(model, s))
                ):
                    results = msgspec.structs.replace(results, found=[*others, found])
                    write_text(folder / FILE, to_json(results, indent=1))
                    tell(f"layer {found.done} of {found.layers}  ({found.seconds:.0f} s)")
            if (match := results.found[-1].match) < RETRIEVES:
                tell(
                    f"{model} answers {match:.0%} of the examples: a ranking of its heads by what "
                    "it loses says little; give shorter lengths, or another task"
                )
    return results


def _about(model: str, seconds: float) -> str:
    return f"{model}: about {max(1, round(seconds / 60))} minutes"


def _begin(model: str, asked: Question, key: str, examples: int) -> Ablation:
    return Ablation(
        model=model,
        task=asked.task,
        length=asked.length,
        unit=asked.unit,
        key=key,
        examples=examples,
        match=0.0,
        nats=0.0,
        layers=-1,
        losses=[],
        seconds=0.0,
    )


def _key(model: str, asked: Question, material: Material, settings: Sequence[str | None]) -> str:
    """Hash of all that the scores depend on, apart from the machine."""
    kind = PROBES[asked.task].data if asked.task in PROBES else ""
    data = material.fingerprint(kind) if kind else ""
    about = [
        [*asked._replace(rows=0)[:-1], *asked.windows],
        data,
        fingerprint(model, None),
        *settings,
    ]
    return sha256(json.dumps(about).encode()).hexdigest()[:16]
