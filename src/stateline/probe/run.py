"""Running probes: one point after the other, each written as soon as it is measured."""

import json
import math
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import msgspec

from stateline.errors import InputError, check_choice, unknown_name
from stateline.evaluate.harness import Metric
from stateline.files import check_writable, regular_file, sole_writer, write_text
from stateline.probe.load import fingerprint
from stateline.probe.material import Material
from stateline.probe.prompts import Example
from stateline.probe.reader import Reader, Tokens
from stateline.probe.results import FORMAT, Point, ProbeResults, Sample
from stateline.probe.tasks import PROBES, NoExamples, Probe, check_length, make_examples
from stateline.runs.results import from_json, to_json
from stateline.runs.verdict import wilson
from stateline.settings import at_least
from stateline.train.environment import environment

FILE = "probes.json"
_NAMED = re.compile(rf"({'|'.join(PROBES)})(?:_([1-9]\d*))?")
_TIMED, _STEPS = 4, 8
"""Prompts whose time gives the forecast, and the tokens that each gets."""

_SHOWN = 200
"""Characters of a prompt that are kept as a sample."""


class Settings(NamedTuple):
    """How much is measured.

    Attributes:
        error: Examples are asked until the 95% interval of exact match is this close to its middle,
            on both sides; 0 for all examples.
        examples: Largest number of examples of a point.
        rows: Prompts that a model reads at a time.
        seed: Seed of the examples; the same for all models.
    """

    error: float = 0.1
    examples: int = 640
    rows: int = 16
    seed: int = 0


class Plan(NamedTuple):
    """The measurements of a run.

    Attributes:
        models: Names of models, as ``load`` takes them.
        tasks: Names of probes.
        lengths: Lengths for all probes; empty for each probe's own.
        settings: How much is measured.
        tokenizer: Tokenizer instead of the models' own; scores depend on it.
        dtype: Precision of the weights; scores depend on it. ``None`` for the precision in which
            they were saved.
    """

    models: Sequence[str]
    tasks: Sequence[str]
    lengths: Sequence[int] = ()
    settings: Settings = Settings()
    tokenizer: str | None = None
    dtype: str | None = None

    def check(self) -> None:
        """Raise InputError if something cannot be measured."""
        for task in self.tasks:
            check_choice("probe", task, PROBES)
        given = self.settings
        at_least(0, error=given.error)
        at_least(1, examples=given.examples, rows=given.rows)
        for _, task, length in self.points():
            check_length(task, length, given.examples)

    def points(self) -> Iterator[tuple[str, str, int]]:
        """Model, probe and length of every point, in order."""
        for model in self.models:
            for task in self.tasks:
                yield from ((model, task, n) for n in self.lengths or PROBES[task].lengths)


def run_probes(
    plan: Plan,
    material: Material,
    load: Callable[[str], Reader],
    folder: Path,
    *,
    command: str = "",
    on_point: Callable[[Point, bool], object] = lambda *_: None,
    tell: Callable[[str], object] | None = None,
) -> ProbeResults:
    """Measure what is not in the folder yet.

    Args:
        plan: What to measure.
        material: Names, documents and questions.
        load: Reads a model by its name; called only if a point of it is missing.
        folder: Folder of ``probes.json``. Points in this file are not measured again if the files
            and settings that they depend on are the same.
        command: How to produce the results again.
        on_point: Called after each point, with whether it was measured now.
        tell: Called with a forecast before the first point of each model.

    Raises:
        InputError: If something cannot be read or written; measured points are kept.
    """
    plan.check()
    check_writable(folder / FILE)
    with sole_writer(folder):
        results = read_probes(folder) if (folder / FILE).exists() else _empty(command)
        wanted = [(*point, _key(*point, plan, material)) for point in plan.points()]
        kinds = {PROBES[point[1]].data for point in wanted if results.known(*point) is None}
        for kind in sorted(kinds - {""}):
            material.read(kind)
        reader: Reader | None = None
        for model, task, length, key in wanted:
            if (point := results.known(model, task, length, key)) is not None:
                on_point(point, False)
                continue
            if reader is None or reader.name != model:
                reader = None  # before the next model is read: two may not fit into memory
                reader = load(model)
                if tell is not None:
                    missing = [p[1:3] for p in wanted if p[0] == model and not results.known(*p)]
                    tell(forecast(reader, missing, plan.settings, material))
            point = _measure(reader, task, length, plan.settings, material, key)
            others = [
                p for p in results.points if (p.model, p.task, p.length) != (model, task, length)
            ]
            results = msgspec.structs.replace(results, points=[*others, point])
            write_text(folder / FILE, to_json(results, indent=1))
            on_point(point, True)
    return results


def read_probes(folder: Path) -> ProbeResults:
    """Read ``probes.json``.

    Raises:
        InputError: If it is missing or damaged.
    """
    path = regular_file(folder / FILE, "results of probes")
    try:
        return from_json(path.read_bytes(), ProbeResults)
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: {error}; restore it, or remove it to begin anew"
        ) from error


class Asked(NamedTuple):
    """What a model answered to the examples of a probe at one length.

    Attributes:
        examples: The examples.
        prompt_tokens: Tokens of the longest prompt.
        texts: The answers; empty if the probe was skipped.
        scores: Exact match and F1 of each.
        skipped: Why the model was not asked; empty if it was.
    """

    examples: list[Example]
    prompt_tokens: int
    texts: list[str]
    scores: list[tuple[float, float]]
    skipped: str


def ask(reader: Reader, task: str, length: int, settings: Settings, material: Material) -> Asked:
    """Ask a model the first examples of a probe, as many as the wanted error needs."""
    drawn, found = _drawn(reader, task, length, settings, material), Asked([], 0, [], [], "")
    share = 1.0  # the fewest examples are needed if all answers are right
    while (n := needed(settings, share) - len(found.scores)) > 0 and not found.skipped:
        whole = -(-n // settings.rows) * settings.rows
        found = _ask_some(reader, PROBES[task], list(islice(drawn, whole)), settings.rows, found)
        share = fmean(match for match, _ in found.scores) if found.scores else 1.0
    return found


def _drawn(
    reader: Reader, task: str, length: int, settings: Settings, material: Material
) -> Iterator[Example]:
    return make_examples(
        task,
        length,
        settings.examples,
        material=material,
        encode=reader.encode,
        decode=reader.decode,
        seed=str(settings.seed),
    )


def needed(settings: Settings, share: float) -> int:
    """Number of examples for the wanted error, if this share of the answers is exact.

    Example:
        >>> needed(Settings(error=0.1), 1.0), needed(Settings(error=0.1), 0.5)
        (16, 93)
    """

    def close(n: int) -> bool:
        low, high = wilson(share, n)
        return high - low <= 2 * settings.error

    return bisect_left(range(settings.examples), True, lo=1, key=close)


def _ask_some(
    reader: Reader, probe: Probe, examples: list[Example], rows: int, before: Asked
) -> Asked:
    """Ask further examples."""
    prompts = [reader.prompt(example.prompt) for example in examples]
    limits, skipped = _answer_limits(reader, probe, examples, prompts)
    longest = max(before.prompt_tokens, *map(len, prompts))
    if skipped:
        return Asked(examples, longest, [], [], skipped)
    texts = _answers(reader, probe, prompts, limits, rows)
    scores = [probe.score(*pair) for pair in zip(examples, texts, strict=True)]
    own = before.examples + examples, longest, before.texts + texts, before.scores + scores
    return Asked(*own, "")


def forecast(
    reader: Reader, points: Sequence[tuple[str, int]], settings: Settings, material: Material
) -> str:
    """How long points of a model may take, from the time of a few prompts.

    The least is for right answers at the least number of examples, the most for answers that never
    end at the largest number.
    """
    known, least, most = list[tuple[list[Example], list[list[int]], list[int]]](), 0.0, 0.0
    for task, length in points:
        with suppress(NoExamples):
            some = list(islice(_drawn(reader, task, length, settings, material), _TIMED))
            prompts = [reader.prompt(one.prompt) for one in some]
            limits, skipped = _answer_limits(reader, PROBES[task], some, prompts)
            if not skipped:
                known.append((some, prompts, limits))
    if not known:
        return f"{reader.name}: nothing can be measured"
    _, prompts, limits = min(known, key=lambda one: len(one[1][0]))
    seconds, more = [], min(_STEPS, *limits) - 1
    for steps in (1, 1 + more):
        begin = time.perf_counter()
        reader.answer(prompts, [steps] * len(prompts), "\0", never_empty=True)
        seconds.append(time.perf_counter() - begin)
    step = max(0.0, seconds[1] - seconds[0]) / max(1, more)
    read = max(0.0, seconds[0] - step) / sum(map(len, prompts))
    few, many = needed(settings, 1.0), needed(settings, 0.5)
    for some, prompts, limits in known:
        size = fmean(map(len, prompts))
        answer = fmean(len(reader.encode(one.continuation)) for one in some)
        least += few * size * read + math.ceil(few / settings.rows) * answer * step
        most += many * size * read + math.ceil(many / settings.rows) * fmean(limits) * step
    low, high = (max(1, round(s / 60)) for s in (least, most))
    return f"{reader.name}: about {low} to {high} minutes"


def is_probe(name: str) -> bool:
    """Whether a task of an evaluation is a probe: ``copy``, or ``copy_50`` for one length."""
    return _NAMED.fullmatch(name) is not None


def score_probe(
    reader: Reader, name: str, material: Material, *, limit: int | None = None, rows: int = 16
) -> list[Metric]:
    """The scores of a probe, as metrics of an evaluation suite.

    Args:
        reader: The model.
        name: ``copy`` for each of the probe's own lengths, ``copy_50`` for one length.
        material: Names, documents and questions.
        limit: Number of examples; by default as many as ``stateline probe`` draws.
        rows: Prompts that the model reads at a time.

    Raises:
        InputError: If the limit is not positive, data is missing or too short for a length, or a
            prompt is too long for the model.
    """
    if (named := _NAMED.fullmatch(name)) is None:
        raise unknown_name("probe", name, PROBES)
    probe, length = named.groups()
    at_least(1, limit=limit)
    how = Settings(rows=rows) if limit is None else Settings(0.0, limit, rows)
    metrics = []
    for size in [int(length)] if length else PROBES[probe].lengths:
        check_length(probe, size, how.examples)
        asked = ask(reader, probe, size, how, material)
        if asked.skipped:
            lower = f"take a lower length, as {probe}_{size // 2 or 1}"
            raise InputError(f"{probe}_{size} {asked.skipped}: {lower}")
        columns = zip(("exact_match", "f1"), zip(*asked.scores, strict=True), strict=True)
        metrics += [_metric(f"{probe}_{size}", *column) for column in columns]
    return metrics


def _metric(task: str, name: str, scores: Sequence[float]) -> Metric:
    n = len(scores)
    error = stdev(scores) / math.sqrt(n) if n > 1 else 0.0
    return Metric(task, name, fmean(scores), error or None, n)  # 0 would be no error


def _measure(
    reader: Reader, task: str, length: int, settings: Settings, material: Material, key: str
) -> Point:
    """The point of one model, probe and length."""
    start = time.perf_counter()
    try:
        asked = ask(reader, task, length, settings, material)
    except NoExamples as error:
        asked = Asked([], 0, [], [], str(error))
    seconds, sample = 0.0, None
    if not asked.skipped:
        seconds, first = time.perf_counter() - start, asked.examples[0]
        sample = Sample(
            prompt=first.prompt[-_SHOWN:],
            accepted=list(first.accepted),
            text=asked.texts[0][:_SHOWN],
        )
    matches, f1s = zip(*asked.scores, strict=True) if asked.scores else ((0.0,), (0.0,))
    return Point(
        model=reader.name,
        task=task,
        length=length,
        key=key,
        examples=len(asked.scores),
        exact_match=fmean(matches),
        f1=fmean(f1s),
        prompt_tokens=asked.prompt_tokens,
        seconds=seconds,
        skipped=asked.skipped,
        sample=sample,
    )


def _answer_limits(
    reader: Reader, probe: Probe, examples: Sequence[Example], prompts: Sequence[Tokens]
) -> tuple[list[int], str]:
    """New tokens of each answer, and why a model cannot give them; empty if it can."""
    limits = [probe.new_tokens(len(prompt)) for prompt in prompts]
    if reader.max_len is None:
        return limits, ""
    free = [reader.max_len - len(prompt) for prompt in prompts]
    wanted = [len(reader.encode(example.continuation)) for example in examples]
    if all(most >= least for most, least in zip(free, wanted, strict=True)):
        return [max(1, min(pair)) for pair in zip(limits, free, strict=True)], ""
    longest = max(len(prompt) + new for prompt, new in zip(prompts, wanted, strict=True))
    return limits, f"needs {longest:,} tokens; the model was made for {reader.max_len:,}"


def _answers(
    reader: Reader, probe: Probe, prompts: Sequence[Tokens], limits: Sequence[int], rows: int
) -> list[str]:
    """Answers to all prompts, prompts of similar length together."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    texts = [""] * len(prompts)
    for start in range(0, len(order), rows):
        some = order[start : start + rows]
        given = [prompts[i] for i in some], [limits[i] for i in some]
        found = reader.answer(*given, probe.stop, never_empty=probe.never_empty)
        for i, text in zip(some, found, strict=True):
            texts[i] = text
    return texts


def _key(model: str, task: str, length: int, plan: Plan, material: Material) -> str:
    """Hash of all that a score depends on, apart from the machine."""
    kind, settings = PROBES[task].data, plan.settings
    data = material.fingerprint(kind) if kind else ""
    chosen = [settings.error, settings.examples, settings.seed, plan.dtype]
    files = fingerprint(model, plan.tokenizer)
    return sha256(json.dumps([task, length, chosen, data, files]).encode()).hexdigest()[:16]


def _empty(command: str) -> ProbeResults:
    return ProbeResults(
        format=FORMAT,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment={**environment()},
        points=[],
    )
