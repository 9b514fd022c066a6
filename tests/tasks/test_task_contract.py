"""What every task promises."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stateline.data import write_corpus
from stateline.errors import InputError
from stateline.tasks import (
    IGNORE,
    TASKS,
    Answers,
    Batch,
    GeneratedTask,
    LabelledTask,
    Mixture,
    Problems,
    RowsTask,
    Task,
    Text,
    Tokens,
    make_task,
)
from tests.tasks.small_data import WRITERS, answers, task_on

GENERATED = sorted(name for name, kind in TASKS.items() if issubclass(kind, GeneratedTask))
LABELLED = sorted(name for name, kind in TASKS.items() if issubclass(kind, LabelledTask))
TRAINING_KEYWORDS = {
    "steps",
    "lr",
    "schedule",
    "warmup_steps",
    "weight_decay",
    "eval_every",
    "stop_at",
}

# Beginning of the SHA-256 of the first batch of seed 0.
GOLDEN_TRAINING = {
    "Algorithm": "ef3fdbe30ad58707",
    "Answers": "a7ceec35951a1775",
    "AssociativeRecall": "5cfffba1aa0aa199",
    "ByteText": "5a45b0504d8d770e",
    "Copying": "5145725bc7a77d3b",
    "DuplicateNgram": "5145725bc7a77d3b",
    "EEG": "19902f38e0739415",
    "FlipFlop": "36052894501c4556",
    "InContextRecall": "3ecb4558d489e610",
    "InductionHead": "4c5b4f727e6325ba",
    "ListOps": "6ac0f6c8de5417af",
    "Memorization": "9e6a978b8a00932c",
    "Mixture": "7229f30dc3d16602",
    "MultiQueryRecall": "bcfa7574f9f51232",
    "NgramLookup": "013773158a392f5b",
    "ObjectCollision": "f1a259429c4aab14",
    "Pathfinder": "e23e929ab27dafb4",
    "RandomWalk": "ad3171dfc31af115",
    "Retrieval": "ce8e4b79faaf5473",
    "SelectiveCopying": "c849c96a3bb00992",
    "SequentialImage": "1b30737877867d03",
    "Signals": "9302121ead00705b",
    "SpeechCommands": "bcd4e8d4d6be6563",
    "SpokenDigits": "ff8c5c579082d0c2",
    "Text": "7c70256a46ecda39",
    "Tokens": "7c70256a46ecda39",
    "WordProblem": "cd78d8e6fbc77ddc",
}
GOLDEN_PROBLEMS = {
    "associative_recall": "b0a252b21e46d1c8",
    "copying": "649b62d23dc46eed",
    "duplicate_ngram": "da08b1ab0aa55037",
    "induction_head": "869dc3e30ea3dfbe",
    "ngram_lookup": "a6fc0f6adc7dbe27",
}
GOLDEN_LABELLED = {
    "algorithm": "c17838cd538fa1c8",
    "flip_flop": "b78903eb411e9b72",
    "in_context_recall": "be996c4095312a07",
    "memorization": "f0c8ed5bfa98e862",
    "multi_query_recall": "af4517fdabfbae36",
    "object_collision": "e6f72a7060fdcce9",
    "random_walk": "d609066d6f2cb456",
    "selective_copying": "205a94fe35422822",
    "word_problem": "7fdd7721f5e1c376",
}


@pytest.fixture(params=TASKS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Task]:
    """Makes one of the tasks from its seed; the text is one that no Python version changes."""
    if request.param in WRITERS:
        spec = task_on(request.param, tmp_path)
        return lambda seed=0: make_task(spec, seed=seed)
    if request.param == "answers":
        path = answers(tmp_path)
        return lambda seed=0: Answers(seed, path=str(path), documents="separate")
    if request.param not in ("text", "tokens", "mixture"):
        return lambda seed=0: make_task(request.param, seed=seed)
    path = tmp_path / "text"
    path.write_bytes(bytes(place * place % 251 for place in range(5000)))
    if request.param == "text":
        return lambda seed=0: Text(seed, path=str(path))
    if request.param == "mixture":
        other = tmp_path / "other"
        other.write_bytes(bytes(place * place % 241 for place in range(7000)))
        return lambda seed=0: Mixture(seed, texts=f"{path}:1 {other}:3", length=64)
    write_corpus([path], tmp_path / "corpus", workers=1)
    return lambda seed=0: Tokens(seed, path=str(tmp_path / "corpus"))


def _fingerprint(value: Batch | Problems) -> str:
    digest = hashlib.sha256()
    for tensor in value:
        digest.update(repr(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def test_training_batches_are_the_same_everywhere(make: Callable[..., Task]) -> None:
    task = make()
    assert _fingerprint(task.train_batch(0)) == GOLDEN_TRAINING[type(task).__name__]


@pytest.mark.parametrize("name", GENERATED)
def test_problems_are_the_same_everywhere(name: str) -> None:
    task = make_task(name)
    assert isinstance(task, GeneratedTask)
    assert _fingerprint(task.problems(task.train_length, 0)) == GOLDEN_PROBLEMS[name]


def test_training_batches_do_not_depend_on_the_order_of_calls(make: Callable[..., Task]) -> None:
    task, again = make(), make()
    forward = [_fingerprint(task.train_batch(index)) for index in (0, 1, 2)]
    backward = [_fingerprint(again.train_batch(index)) for index in (2, 1, 0)]
    assert forward == backward[::-1]


def test_every_index_and_seed_has_a_batch_of_its_own(make: Callable[..., Task]) -> None:
    batches = [make(seed).train_batch(index) for seed in (0, 1) for index in (0, 1)]
    assert len({_fingerprint(batch) for batch in batches}) == 4


def test_a_training_batch_has_batch_size_rows(make: Callable[..., Task]) -> None:
    task = make()
    assert len(task.train_batch(0).tokens) == task.batch_size


def test_tokens_are_in_the_vocabulary_and_targets_too_or_ignored(make: Callable[..., Task]) -> None:
    task = make()
    tokens, targets = task.train_batch(0)
    classes = (
        task.model_config("h3", {}).n_outputs if isinstance(task, RowsTask) else task.vocab_size
    )
    assert tokens.shape[:2] == targets.shape
    if not tokens.is_floating_point():
        assert 0 <= tokens.min() <= tokens.max() < task.vocab_size
    scored = targets[targets != IGNORE]
    assert len(scored) > 0
    assert 0 <= scored.min() <= scored.max() < classes


def test_a_target_is_the_next_token_or_ignored(make: Callable[..., Task]) -> None:
    task = make()
    if isinstance(task, LabelledTask | RowsTask | Answers):
        pytest.skip("its targets are labels, or padding follows the last")
    tokens, targets = task.train_batch(0)
    following, expected = tokens[:, 1:], targets[:, :-1]
    assert ((expected == following) | (expected == IGNORE)).all()


def test_evaluation_lengths_begin_with_the_training_length(make: Callable[..., Task]) -> None:
    task = make()
    assert task.eval_lengths[0] == task.train_length
    assert list(task.eval_lengths) == sorted(set(task.eval_lengths))


def test_training_keywords_are_those_of_the_trainer(make: Callable[..., Task]) -> None:
    assert set(make().training) <= TRAINING_KEYWORDS


@pytest.mark.parametrize("name", GENERATED)
def test_evaluation_is_not_training(name: str) -> None:
    task = make_task(f"{name}(batch_size={TASKS[name].problems_per_batch})")
    assert isinstance(task, GeneratedTask)
    prompts = task.problems(task.train_length, 0).prompts
    trained = [task.train_batch(index).tokens[:, : prompts.shape[1]] for index in range(20)]
    trained_rows = {tuple(row) for tokens in trained for row in tokens.tolist()}
    assert not trained_rows & {tuple(row) for row in prompts.tolist()}


@pytest.mark.parametrize("name", GENERATED)
def test_problems_depend_on_length_and_index_alone(name: str) -> None:
    task = make_task(name)
    assert isinstance(task, GeneratedTask)
    first = [_fingerprint(task.problems(length, index)) for length in (9, 10) for index in (0, 1)]
    again = [_fingerprint(task.problems(length, index)) for length in (9, 10) for index in (0, 1)]
    assert first == again
    assert len(set(first)) == 4


@pytest.mark.parametrize("name", GENERATED)
def test_the_right_answers_score_one(name: str) -> None:
    task = make_task(name)
    assert isinstance(task, GeneratedTask)
    answers = task.problems(task.train_length, 0).answers
    assert task.score(answers, answers)[task.metric] == 1.0


@pytest.mark.parametrize("name", GENERATED)
def test_every_problem_is_counted(name: str) -> None:
    task = make_task(name)
    assert isinstance(task, GeneratedTask)
    counts = [len(task.problems(task.train_length, index).answers) for index in range(3)]
    assert task.problems_scored(3) == sum(counts)


@pytest.fixture(params=LABELLED)
def labelled(request: pytest.FixtureRequest) -> LabelledTask:
    brief = ", statements=20" if request.param == "algorithm" else ""
    task = make_task(f"{request.param}(batch_size=4{brief})")
    assert isinstance(task, LabelledTask)
    return task


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_batches_are_the_same_everywhere(name: str) -> None:
    task = make_task(name)
    assert isinstance(task, LabelledTask)
    assert _fingerprint(task.labelled(task.train_length, 0)) == GOLDEN_LABELLED[name]


def test_labelled_batches_are_as_long_as_wanted(labelled: LabelledTask) -> None:
    for length in (16, 64):
        tokens, targets = labelled.labelled(length, 0)
        assert tokens.shape == targets.shape
        assert tokens.shape[1] == length


def test_every_labelled_row_is_counted(labelled: LabelledTask) -> None:
    counts = [len(labelled.labelled(labelled.train_length, index).tokens) for index in range(3)]
    assert labelled.problems_scored(3) == sum(counts)


def test_labelled_batches_depend_on_length_and_index_alone(labelled: LabelledTask) -> None:
    first = [_fingerprint(labelled.labelled(n, index)) for n in (64, 72) for index in (0, 1)]
    again = [_fingerprint(labelled.labelled(n, index)) for n in (64, 72) for index in (0, 1)]
    assert first == again
    assert len(set(first)) == 4


def test_labelled_rows_are_not_trained_on(labelled: LabelledTask) -> None:
    scored = labelled.labelled(labelled.train_length, 0).tokens
    trained = [labelled.train_batch(index).tokens for index in range(5)]
    if labelled.carries_state:
        trained += [labelled.consecutive_batch(index).tokens for index in range(5)]
    rows = {tuple(row) for tokens in trained for row in tokens.tolist()}
    assert not rows & {tuple(row) for row in scored.tolist()}


def test_right_labels_score_one(labelled: LabelledTask) -> None:
    targets = labelled.labelled(labelled.train_length, 0).targets
    assert set(labelled.score(targets, targets).values()) == {1.0}


def test_wrong_labels_score_nothing_whatever_is_said_elsewhere(labelled: LabelledTask) -> None:
    targets = labelled.labelled(labelled.train_length, 0).targets
    wrong = torch.where(targets == IGNORE, targets, targets - 1)
    assert set(labelled.score(targets, wrong).values()) == {0.0}


def test_the_last_quarter_is_scored_by_itself() -> None:
    task = make_task("word_problem")
    assert isinstance(task, LabelledTask)
    targets = torch.tensor([[4, 4, 4, 4, 4, 4, 4, IGNORE]])
    predictions = torch.tensor([[4, 4, 4, 0, 0, 0, 4, 0]])
    assert task.score(targets, predictions) == {
        "accuracy": pytest.approx(4 / 7),
        "last_quarter_accuracy": 1.0,
    }


def test_labels_follow_inputs_in_the_vocabulary(labelled: LabelledTask) -> None:
    """But for those that are words of the input, too."""
    recall = "In-context recall", "Multi-query recall"
    if labelled.title in ("Algorithm", "Flip-flop", "Selective copying", *recall):
        pytest.skip("its labels are words of the input")
    tokens, targets = labelled.labelled(2048, 0)
    assert tokens.max() < targets[targets != IGNORE].min()


def test_a_task_names_its_scores_before_a_model_is_scored(make: Callable[..., Task]) -> None:
    task = make()
    assert task.metric in task.score_names()


def test_there_is_no_batch_before_the_first(make: Callable[..., Task]) -> None:
    task = make()
    readers = [task.train_batch, *([task.consecutive_batch] if task.carries_state else [])]
    for read in readers:
        with pytest.raises(InputError, match="numbers of batches, must be at least 0, got -1"):
            read(-1)
