"""State-tracking tasks: official samples under our grammar and our labels."""

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch

from stateline.tasks import IGNORE, Algorithm, ObjectCollision
from stateline.tasks.base import generator
from tests.parity.cases import Case, covers

pytestmark = pytest.mark.cpu  # what is tested are tasks

NOTHING, BORDER, UNKNOWN = "_", "<eos>", "<unk>"
"""Words of the official vocabulary that are no part of a program."""


def read(case: Case) -> tuple[Algorithm, list[str], list[str]]:
    """Our task, and the words and labels of an official text."""
    text, labels = ((case.path.parent / name).read_text() for name in case.about["files"])
    task = Algorithm(variables=case.about["variables"], statements=case.about["task_len"], length=8)
    return task, text.split(), labels.split()


def decode(case: Case) -> tuple[Algorithm, list[str], list[str]]:
    """The same of official tokens."""
    known, tensors = case.about["idx2word"], case.tensors()
    task = Algorithm(variables=len(set(known) & set("xyzpr")), length=8)
    words, labels = ([known[i] for i in tensors[name].tolist()] for name in ("ids", "label_ids"))
    return task, words, labels


def as_labels(printed: Sequence[int | None]) -> list[str]:
    return [NOTHING if value is None else str(value) for value in printed]


@covers("algorithm-task text")
def test_official_programs_print_what_they_print_officially(case: Case) -> None:
    task, words, labels = read(case)
    assert as_labels(task.run(words)) == labels


@covers("algorithm-task text")
def test_official_labels_score_one(case: Case) -> None:
    task, words, labels = read(case)
    targets = torch.from_numpy(task.targets(words))[None]
    official = torch.tensor([[0 if n == NOTHING else task.words.index(n) for n in labels]])
    assert task.score(targets, official) == {"accuracy": 1.0, "last_quarter_accuracy": 1.0}


@covers("algorithm-task text")
def test_our_programs_are_drawn_as_the_official_ones_are(case: Case) -> None:
    """Kinds of statements and tokens are as many, within four deviations."""
    task, words, _ = read(case)
    rng, count = generator(0, "test"), case.about["ntasks"]
    ours = [task.words[t] for _ in range(count) for t in task.episode(rng).tokens]
    drawn, official = Counter(statements(ours)), Counter(statements(words))
    for operation, total in official.items():
        spread = (total + drawn[operation]) ** 0.5
        assert abs(drawn[operation] - total) < 4 * spread, operation
    assert len(ours) == pytest.approx(len(words), rel=0.3 / count**0.5)


def statements(words: list[str]) -> Iterator[str]:
    """What kind each statement is of, and what kind is nested in it."""
    for statement in " ".join(words).replace("END", "").split(";")[:-1]:
        outer, _, nested = statement.partition(":")
        yield next(op for op in ("if", "print", "=", "++", "--") if op in outer.split())
        if nested:
            yield f"nested {nested.split()[1]}"
            yield "compared with a value" if outer.split()[3].isdecimal() else "with a variable"


@covers("algorithm-task tokens")
def test_official_tokens_print_what_they_print_officially(case: Case) -> None:
    task, words, labels = decode(case)
    assert as_labels(task.run(words)) == labels


@covers("algorithm-task tokens")
def test_the_official_vocabulary_is_ours_and_three_words(case: Case) -> None:
    task, words, labels = decode(case)
    lines = words.count("END")
    end = words.index("END") + 1  # of the first line, where a word for its end follows
    seen = [*dict.fromkeys([UNKNOWN, *words[:end], BORDER, *words, *labels])]
    seen.reverse()
    counts = Counter([*words, *labels, *[BORDER] * 2 * lines])
    vocabulary = sorted(seen, key=lambda word: -counts[word])
    assert vocabulary == case.about["idx2word"]
    assert [counts[word] for word in vocabulary] == case.about["counts"]
    assert {*task.words, NOTHING, BORDER, UNKNOWN} == set(vocabulary)


@covers("object_collision")
def test_official_particles_get_their_official_labels(case: Case) -> None:
    task, tensors = ObjectCollision(), case.tensors()
    targets = task.targets(tensors["x"][None])[0]
    official = tensors["y"]
    assert targets.equal(torch.where(official == 0, IGNORE, task.n_inputs - 1 + official))
