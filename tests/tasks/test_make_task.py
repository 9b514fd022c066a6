import pytest

from stateline.errors import InputError
from stateline.tasks import TASKS, Copying, Task, make_task
from tests.tasks.small_data import WRITERS


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"answers", "mixture", "tokens", *WRITERS}))
def test_a_task_is_made_from_its_name_alone(name: str) -> None:
    assert type(make_task(name)) is TASKS[name]


def test_keywords_reach_the_task() -> None:
    assert make_task("copying(n_letters=5, max_len=8)").vocab_size == 9


def test_the_seed_reaches_the_task() -> None:
    batches = [task.train_batch(0).tokens for task in (make_task("copying", seed=3), Copying(3))]
    assert batches[0].equal(batches[1])


@pytest.mark.parametrize("text", ["copying text", "copying(text)", "copying*2"])
def test_anything_but_one_plain_item_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="one name with keywords"):
        make_task(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("coping", "unknown task 'coping': did you mean 'copying'"),
        ("mine", r"; for a task of your own, import its file \(--import FILE\)$"),
        ("copying(max_length=9)", "did you mean 'max_len'"),
        ("copying(seed=1)", "unknown keyword of Copying 'seed'"),
        ("copying(max_len=1.5)", "wants max_len to be int of at least 1, got 1.5"),
        ("copying(", "malformed pattern"),
        ("tokens", "the task tokens needs the folder of a corpus"),
        ("mixture", "mixture needs texts of two or more paths with their weights"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_task(text)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(InputError, match="wants seed to be int of at least 0, got -1"):
        make_task("copying", seed=-1)


def test_every_task_says_what_its_scores_tell() -> None:
    assert all(issubclass(task, Task) and task.about.endswith(".") for task in TASKS.values())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("copying(longest=1000000000000000)", "longest of copying must be at most 1,000,000,000"),
        (
            "copying(longest=900000000)",
            "may have up to 268,435,456 positions, got .* rows of length",
        ),
        ("copying(context_len=100000, batch_size=100000)", "may have up to 268,435,456 positions"),
        ("flip_flop(batch_size=900000000)", "may have up to 268,435,456 positions"),
        ("associative_recall(key_length=900000000)", "65536 keys at most"),
        ("copying(longest=1e15)", "wants longest to be int"),
    ],
)
def test_what_would_fill_the_memory_is_refused_at_once(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_task(spec)
