"""How many heads of a transformer must stay in a hybrid, chosen how, beside which recurrence.

Run it: python examples/hybrid_study.py runs/copying --task copying

Judge what is recorded: python examples/hybrid_study.py runs/copying --table TABLE.json

Transformers learn a task, one per seed. ``probe`` ranks their heads by what the task loses without
each. Students keep some heads: the first of the ranking, heads drawn by chance, or the layers that
the task needs most; a recurrence takes the place of the others. New layers learn the outputs of the
old ones, then all weights the teacher's logits. A second start trains what is missing.
"""

import argparse
import dataclasses
import random
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from stateline.charts.chart import Axis, side_by_side
from stateline.charts.export import pictures
from stateline.charts.lines import Line, Point, line_chart
from stateline.charts.style import styled
from stateline.evaluate import evaluate
from stateline.files import write_text
from stateline.layers.state import nbytes
from stateline.models.checkpoint import load_any, save_model
from stateline.models.factory import AnyModel
from stateline.models.language_model import LanguageModel
from stateline.papers.record import RecordedRow, TableRecord, read_table, write_table
from stateline.probe import Material, load_reader
from stateline.probe.heads import Question, probe_heads
from stateline.runs.initial import start_from
from stateline.runs.judged import kind_of
from stateline.runs.record import Record
from stateline.runs.score import EVAL_BATCHES
from stateline.runs.store import describe_task
from stateline.runs.verdict import ERROR_RATE, compare
from stateline.tasks import Task, make_task
from stateline.train import train
from stateline.train.config import TrainConfig
from stateline.train.environment import environment

TASKS = {
    "copying": "copying(n_letters=16, max_len=8, context_len=20, batch_size=16)",
    "lookup": (
        "ngram_lookup(n_letters=16, n=1, answer_len=3, min_len=4, max_len=8, context_len=20, "
        "batch_size=16)"
    ),
}
"""What teachers learn: to copy a string, or to find a letter and give the three after it."""

OTHER = 1000
"""Added to a seed for the rows by which heads are chosen: they are not those of the scores."""

PLACES, HEADS, WIDTH = (1, 2), 4, 16
D_MODEL, FIRST, ATTENTION = HEADS * WIDTH, "gated_conv", "attention(position=rope"
"""Layer 0 of all models is a short convolution, beside which attention learns in few updates."""

LEARNED, ROUNDS = 0.98, 6
"""A teacher is trained until this share of its answers is right, at most so often."""

RECURRENCES = {
    "gated_delta_net": "gated_delta_net(n_heads={n}, d_key={key}, expand_v={per_key})",
    "gated_linear_attention": (
        "gated_linear_attention(n_heads={n}, expand_k={keys}, expand_v={values})"
    ),
    "mamba2": "mamba2(n_groups={n}, d_head=16, d_state={key}, expand={values})",
}
"""A recurrence with n heads, keys of ``key`` entries and values of 16, in each pattern."""

SMALL = 2
"""Width of keys of the smaller state: an eighth of that of the old heads."""

ENOUGH = 0.95
"""Share of the teacher's score that counts as recovered."""

STAGES = {"outputs": (20, 1e-2), "logits": (60, 4e-3)}
"""Updates and rate of each stage."""


Orders = dict[str, list[tuple[int, int]]]
"""The heads of a teacher in the order in which each choice keeps them: layer and number."""


class Result(Record, frozen=True, kw_only=True):
    """What became of a student.

    Attributes:
        score: Share of its answers that are right.
        kept: The heads that stayed.
        state: Bytes of its state after a row of the task.
        seconds: Processor time of its training.
    """

    score: float
    kept: list[tuple[int, int]]
    state: int
    seconds: float


class Student(NamedTuple):
    """What a student keeps.

    Attributes:
        recurrence: What takes the place of the other heads.
        key: Width of its keys.
        choice: How heads are chosen: ``ranking``, ``chance`` or ``layers``.
        kept: Number of heads that stay.
    """

    recurrence: str
    key: int
    choice: str
    kept: int

    @property
    def label(self) -> str:
        """Its name without the number of heads."""
        return f"{self.recurrence}, keys of {self.key}, {self.choice}"


GRID = (
    ("ranking", WIDTH, 4),
    ("chance", WIDTH, 4),
    ("ranking", WIDTH, 2),
    ("chance", WIDTH, 2),
    ("ranking", WIDTH, 0),
    ("ranking", SMALL, 4),
    ("layers", WIDTH, 4),
    ("ranking", WIDTH, 1),
    ("chance", WIDTH, 1),
)
"""Students beside each recurrence: how heads are chosen, width of keys, heads that stay."""


def pattern(student: Student, kept: list[tuple[int, int]]) -> str:
    """The layers of a student that keeps some heads, each given by layer and number."""
    found = [FIRST]
    for layer in PLACES:
        own = sorted(head for place, head in kept if place == layer)
        n = HEADS - len(own)
        sizes = {"n": n, "key": student.key, "per_key": WIDTH // student.key}
        sizes |= {"keys": n * student.key / D_MODEL, "values": n * WIDTH / D_MODEL}
        beside = RECURRENCES[student.recurrence].format(**sizes)
        stay = f"{ATTENTION}, n_heads={len(own)}, n_kv_heads={len(own)}, d_head={WIDTH})"
        whole = {
            0: beside + " feed_forward" * (student.recurrence == "mamba2"),
            HEADS: f"{ATTENTION}, n_heads={HEADS})",
        }
        numbers = " ".join(map(str, own))
        mixed = f'parallel({stay}, {beside}, keeps="{numbers}")'
        found.append(whole.get(len(own), mixed))
    return " ".join(found)


class Run(NamedTuple):
    """A teacher and its students.

    Attributes:
        folder: Where they are kept.
        spec: The task.
        seed: Seed of all that is drawn.
        share: Share of all updates.
    """

    folder: Path
    spec: str
    seed: int
    share: float

    @property
    def task(self) -> Task:
        """The task, with the seed."""
        return make_task(self.spec, seed=self.seed)

    def train(self, model: AnyModel, steps: int, lr: float, **settings: str) -> None:
        """Train a model for the share of the updates."""
        steps = max(1, round(self.share * steps))
        own = {"steps": steps, "lr": lr, "warmup_steps": steps // 8, "eval_every": 0}
        train(model, self.task, TrainConfig(**own, **settings))

    def score(self, model: AnyModel) -> float:
        """The share of answers that are right."""
        task = self.task
        return evaluate(model, task, task.train_length, batches=EVAL_BATCHES)[task.metric]


def teacher(run: Run) -> LanguageModel:
    """A transformer that has learned the task, kept in the folder."""
    if not (run.folder / "config.json").exists():
        torch.manual_seed(run.seed)
        layers = f"{FIRST} {ATTENTION}, n_heads={HEADS})*{len(PLACES)}"
        model = LanguageModel(run.task.model_config(layers, {"d_model": D_MODEL}))
        for _ in range(ROUNDS):
            run.train(model, 500, 4e-3)
            if run.score(model) >= LEARNED:
                break
        save_model(model, run.folder)
    model = load_any(run.folder)
    assert isinstance(model, LanguageModel)
    return model


def chosen(run: Run) -> Orders:
    """All heads of a teacher, in the order in which each choice keeps them."""
    every = [(layer, head) for layer in PLACES for head in range(HEADS)]
    asked = [
        Question(run.spec, run.task.train_length, unit, examples=64, seed=run.seed + OTHER)
        for unit in ("heads", "layers")
    ]
    home, material = run.folder, Material(None)
    found = probe_heads(str(home), asked, material, load_reader, home / "heads").found
    heads, layers = (next(one for one in found if one.unit == own.unit) for own in asked)
    ranking = [(loss.layer, loss.head) for loss in heads.ranking() if loss.layer in PLACES]
    needed = [loss.layer for loss in layers.ranking() if loss.layer in PLACES]
    whole = [(layer, head) for layer in needed for head in range(HEADS)]
    chance = random.Random(run.seed).sample(every, len(every))
    return {"ranking": ranking, "chance": chance, "layers": whole}


def state_bytes(model: LanguageModel, task: Task) -> int:
    """Bytes of the state of a row of the task."""
    tokens = task.train_batch(0).tokens[:1]
    with torch.inference_mode():
        return nbytes(model.forward_chunk(tokens, model.init_state(1))[1])


def learned(layers: str, run: Run) -> LanguageModel:
    """A student that has learned from the teacher."""
    home, whole = str(run.folder), load_any(run.folder).config
    torch.manual_seed(run.seed)
    model = start_from(dataclasses.replace(whole, pattern=layers), home, run.task)
    for match, (steps, rate) in STAGES.items():
        run.train(model, steps, rate, teacher=home, match=match)
    assert isinstance(model, LanguageModel)
    return model


def result(student: Student, run: Run, orders: Orders) -> Result:
    """The score of a student, from its file or measured."""
    name = f"{student.label}, {student.kept}.json".replace(", ", "-").replace(" ", "-")
    path = run.folder / name
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Result)
    start = time.process_time()
    kept = orders[student.choice][: student.kept]
    model = learned(pattern(student, kept), run)
    taken = round(time.process_time() - start, 1)
    state = state_bytes(model, run.task)
    found = Result(score=run.score(model), kept=kept, state=state, seconds=taken)
    write_text(path, msgspec.json.encode(found).decode() + "\n")
    return found


Found = dict[Student, list[Result]]
"""Results by student, one per seed."""


def study(runs: list[Run], cells: int) -> Found:
    """The results of the first students of the grid, and of the teacher, which keeps all heads."""
    orders, whole = list[Orders](), Student("attention", WIDTH, "all", len(PLACES) * HEADS)
    found: Found = {whole: []}
    for run in runs:
        model = teacher(run)
        orders.append(chosen(run))
        state = state_bytes(model, run.task)
        own = Result(score=run.score(model), kept=[], state=state, seconds=0)
        found[whole].append(own)
        print(f"teacher {run.seed}: {own.score:.3f}, heads {orders[-1]['ranking']}", flush=True)
    for student in (
        Student(name, key, how, n) for how, key, n in GRID[:cells] for name in RECURRENCES
    ):
        found[student] = []
        for run, order in zip(runs, orders, strict=True):
            one = result(student, run, order)
            found[student].append(one)
            print(f"{student.label}, {student.kept}, seed {run.seed}: {one.score:.3f}", flush=True)
    return found


def scores(found: Found, student: Student) -> list[float]:
    """The scores of a student, one per seed."""
    return [one.score for one in found[student]]


def verdicts(found: Found, spec: str) -> list[str]:
    """Whether the ranking beats the other choices, and the larger state the smaller one.

    Each pair gets its share of the error rate, as in a comparison.
    """
    ranked = [student for student in found if student.choice == "ranking"]
    pairs = [
        (first, other)
        for first in ranked
        for other in found
        if first.key == WIDTH and other != first
        if (other.recurrence, other.kept) == (first.recurrence, first.kept)
    ]
    kind, lines = kind_of(describe_task(spec, make_task(spec))), []
    for first, other in pairs:
        both = [scores(found, student) for student in (first, other)]
        test = compare(*both, kind, pairs=len(pairs))
        told = "told apart" if test.chance < ERROR_RATE / len(pairs) else "undecided"
        medians = " and ".join(f"{statistics.median(own):.3f}" for own in both)
        names = f"{first.label} and {other.label}, {first.kept} heads"
        lines.append(f"{names}: {medians}, {told} (p = {test.chance:.4f})")
    return lines


def record(found: Found, runs: list[Run], command: str) -> TableRecord:
    """All scores, as a table."""
    rows = [
        RecordedRow(
            label=student.label,
            x=student.kept,
            seeds=[run.seed for run in runs],
            values=[[one.score for one in own], [one.state for one in own]],
            seconds=round(sum(one.seconds for one in own), 1),
        )
        for student, own in found.items()
    ]
    return TableRecord(
        table="",
        size="laptop",
        command=command,
        created=datetime.now(UTC).date().isoformat(),
        environment={**environment()},
        columns=["right answers", "bytes of state"],
        rows=rows,
        note=f"{runs[0].spec}; heads stay at x; all {len(PLACES) * HEADS} are the teacher",
    )


def recorded(table: TableRecord) -> Found:
    """The results in a table that :func:`record` has made; kept heads and times are not in it."""
    found: Found = {}
    for row in table.rows:
        recurrence, key, choice = row.label.split(", ")
        student = Student(recurrence, int(key.removeprefix("keys of ")), choice, round(row.x or 0))
        found[student] = [
            Result(score=score, kept=[], state=round(state), seconds=0)
            for score, state in zip(*row.values, strict=True)
        ]
    return found


def picture(found: Found) -> str:
    """Charts of the scores by the heads that stay, one for each recurrence, as an SVG document."""
    names = {
        ("ranking", WIDTH): "first of the ranking",
        ("chance", WIDTH): "by chance",
        ("layers", WIDTH): "one layer",
        ("ranking", SMALL): "ranking, an eighth of the state",
    }
    tried = {(student.choice, student.key) for student in found if student.kept}
    names = {pair: name for pair, name in names.items() if pair in tried}
    charts, styles = [], styled(list(names.values()))
    (whole,) = (student for student in found if student.choice == "all")
    end = Point(whole.kept, scores(found, whole))
    for recurrence in RECURRENCES:
        lines = [
            Line(style, sorted([*points, end] if len(points) > 1 else points))
            for (choice, key), style in zip(names, styles, strict=True)
            if (
                points := [
                    Point(student.kept, scores(found, student))
                    for student in found
                    if student[:2] == (recurrence, key)
                    and (student.choice == choice or not student.kept)
                ]
            )
        ]
        axes = (Axis("heads that stay, of 8"), Axis("right answers", domain=(0, 1)))
        charts.append(line_chart(recurrence, recurrence, [], lines, axes))
    (svg,) = pictures([side_by_side(charts)])
    return svg


def show(found: Found, spec: str) -> None:
    """Print all scores, and the verdicts."""
    for student, own in found.items():
        values, state = scores(found, student), statistics.median(one.state for one in own)
        spread = f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        whole = scores(found, next(iter(found)))
        good = sum(a >= ENOUGH * b for a, b in zip(values, whole, strict=True))
        print(f"{student.label}, {student.kept}: {spread}, {good} of {len(values)}, {state} bytes")
    print("\n".join(verdicts(found, spec)))


def main(given: argparse.Namespace) -> None:
    """Train what is missing, print the verdicts, and write the table and the charts."""
    if given.table:
        table = read_table(given.table)
        found = recorded(table)
        show(found, table.note.split(";")[0])
    else:
        spec = TASKS[given.task]
        runs = [Run(given.folder / f"seed-{n}", spec, n, given.share) for n in given.seeds]
        found = study(runs, given.cells)
        show(found, spec)
        options = f"--task {given.task} --cells {given.cells} --share {given.share:g} --seeds"
        command = " ".join(
            ["python examples/hybrid_study.py runs/study", options, *map(str, given.seeds)]
        )
        write_table(given.folder / "table.json", record(found, runs, command))
    write_text(given.folder / "kept-heads.svg", picture(found))


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="copying")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--share", type=float, default=1.0, help="share of all updates")
    parser.add_argument("--cells", type=int, default=len(GRID), help="first rows of GRID to train")
    parser.add_argument("--table", type=Path, help="a record to judge instead of training")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
