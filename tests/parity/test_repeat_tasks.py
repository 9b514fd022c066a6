"""The official strings of Repeat After Me, their masks, scores, loss and schedule are ours."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from stateline.evaluate import token_losses
from stateline.tasks import IGNORE, Copying, DuplicateNgram, NgramLookup
from stateline.tasks.synthetic.strings import StringTask
from stateline.train.config import TrainConfig
from stateline.train.optimizer import learning_rate_share
from tests.parity.cases import Case, covers

pytestmark = pytest.mark.cpu  # what is tested are tasks


def our_task(name: str, about: Mapping[str, Any]) -> StringTask:
    """The task of a name such as ``train/prefix_ngram/v26/n2/ans3``."""
    kind = name.split("/")[1]
    sizes = {
        "n_letters": about["vocab_size"],
        "min_len": about.get("min_length", about.get("length")),
        "max_len": about.get("max_length", about.get("length")),
        "context_len": about["context_len"],
    }
    answer_len = about["length_answer"] or None
    if kind == "copy":
        return Copying(answer_len=answer_len, **sizes)
    if kind == "duplicate_ngram":
        return DuplicateNgram(n=about["n_gram"], **sizes)
    key = kind.removesuffix("_ngram")
    return NgramLookup(n=about["n_gram"], key=key, answer_len=answer_len, **sizes)


def example(task: StringTask, row: list[int]) -> tuple[list[int], int] | None:
    """The example that a row begins with, and the length of its prompt; nothing if it is cut.

    Written from the rules, not from our code.
    """
    order = task.key if isinstance(task, NgramLookup) else ""
    n = task.n if isinstance(task, NgramLookup) else 0
    borders = [place for place, token in enumerate(row) if token == task.sep]
    if len(borders) < (2 if order == "prefix" else 1):
        return None
    if order == "prefix":
        key, string, prompt = row[1 : borders[0]], row[borders[0] + 1 : borders[1]], borders[1] + 1
    else:
        key, string, prompt = row[borders[0] + 1 :][:n], row[1 : borders[0]], borders[0] + 1 + n
    starts = [at for at in range(len(string)) if string[at : at + n] == key]
    if len(key) < n or prompt > len(row):
        return None
    assert len(key) == n
    assert all(token < task.n_letters for token in string)
    # Officially a key may repeat: the first counts. Without a key, the string is asked for.
    answer = string[starts[0] + n :][: getattr(task, "answer_len", None)]
    whole = [*row[:prompt], *answer, task.eos]
    assert row[: len(whole)] == whole[: len(row)]
    return (whole, prompt) if len(whole) <= len(row) else None


def mask(task: StringTask, row: list[int]) -> list[int]:
    """Which tokens of a row the loss looks at; fails where the row breaks the grammar."""
    found: list[int] = []
    while len(found) < len(row):
        rest = row[len(found) :]
        if rest[0] == task.pad:
            assert set(rest) == {task.pad}
            return found + [0] * len(rest)
        assert rest[0] == task.bos
        read = example(task, rest)
        if read is None:
            return found + [0] * len(rest)
        whole, prompt = read
        found += [0] * prompt + [1] * (len(whole) - prompt)
    return found


def strings(case: Case, prefix: str) -> dict[str, Any]:
    return {name: about for name, about in case.about.items() if name.startswith(prefix)}


@covers("tasks")
def test_official_rows_follow_our_grammar_and_carry_its_mask(case: Case) -> None:
    for name, about in {**strings(case, "train/"), **strings(case, "eval/")}.items():
        task = our_task(name, about)
        for row, expected in zip(about["input_ids"], about["mask"], strict=True):
            assert mask(task, row) == expected, name


@covers("tasks")
def test_our_rows_follow_the_same_grammar_and_carry_its_mask(case: Case) -> None:
    for name, about in strings(case, "train/").items():
        task = our_task(name, about)
        tokens, targets = task.train_batch(0)
        assert tokens.shape[1] + 1 == len(about["input_ids"][0])
        for row, expected in zip(tokens.tolist(), targets.tolist(), strict=True):
            ours = [int(target != IGNORE) for target in expected]
            # The last token of a row is a target only; where it is ignored, it is unknown.
            if ours[-1]:
                assert mask(task, [*row, expected[-1]])[1:] == ours, name
            else:
                assert mask(task, row)[1:] == ours[:-1], name


@covers("tasks")
def test_our_problems_are_official_ones_without_answer_and_eos(case: Case) -> None:
    for name, about in strings(case, "eval/").items():
        task = our_task(name, about)
        prompts, answers = task.problems(about["length"], 0)
        sizes = {(row.index(1), row.count(1) - 1) for row in about["mask"]}
        if len(sizes) == 1:  # without length_answer, answers differ in length
            assert sizes == {(prompts.shape[1], answers.shape[1])}, name
        for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
            whole = [*prompt, *(token for token in answer if token != IGNORE), task.eos]
            assert mask(task, whole) == [0] * len(prompt) + [1] * (len(whole) - len(prompt))


@covers("tasks")
def test_official_predictions_score_as_officially(case: Case) -> None:
    for name, about in strings(case, "eval/").items():
        task, rows = our_task(name, about), about["input_ids"]
        for row, asked, predicted, (string, characters) in zip(
            rows, about["mask"], about["pred_ids"], about["scores_str_char"], strict=True
        ):
            places = np.flatnonzero(asked)[:-1]  # EOS is not scored
            answer, prediction = np.array(row)[places], np.array(predicted)[places - 1]
            scores = task.score(torch.tensor(answer[None]), torch.tensor(prediction[None]))
            assert scores["string_accuracy"] == string, name
            assert scores["character_accuracy"] == pytest.approx(characters), name


@covers("tasks")
def test_the_vocabulary_is_the_official_one(case: Case) -> None:
    for vocabulary in strings(case, "tokenizer/").values():
        task = Copying(n_letters=len(vocabulary) - 4)
        special = [vocabulary[sign] for sign in "$|.*"]
        assert special == [task.bos, task.sep, task.eos, task.pad]
        letters = sorted(sign for sign in vocabulary if sign.isalpha())
        assert [vocabulary[letter] for letter in letters] == list(range(task.n_letters))
        assert len(vocabulary) == task.vocab_size


@covers("loss_sched")
def test_the_loss_is_the_mean_over_the_answers(case: Case) -> None:
    tensors = case.tensors()
    logits, labels, counted = tensors["logits"], tensors["labels"], tensors["mask"].bool()
    pad = logits.shape[-1] - 1  # the last token; officially it costs nothing, but counts
    losses = token_losses(logits, labels.where(counted & (labels != pad), IGNORE))
    assert losses.sum() / counted.sum() == pytest.approx(float(tensors["loss"]), rel=1e-6)


@covers("loss_sched")
def test_the_learning_rate_is_the_official_one_but_begins_above_zero(case: Case) -> None:
    official = case.tensors()["lr_by_step"].numpy()
    steps, warmup = len(official), int(official.argmax())
    config = TrainConfig(steps=steps, warmup_steps=warmup, schedule="linear")
    ours = [learning_rate_share(config, step) * official.max() for step in range(steps)]
    assert ours[warmup:] == pytest.approx(official[warmup:])
    assert ours[:warmup] == pytest.approx(official[1 : warmup + 1])
