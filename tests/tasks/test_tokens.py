import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stateline.data import CorpusSettings, write_corpus
from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import IGNORE, Text, Tokens, make_task

WORDS = ["the", "naïve", "quick", "日本", "fox"]


def write(folder: Path, count: int = 30, words: int = 60) -> Path:
    folder.mkdir()
    drawn = random.Random(0)
    for number in range(count):
        text = " ".join(drawn.choices(WORDS, k=words))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Tokens]:
    """Makes the task on thirty documents in characters of one to three bytes."""
    recipe = CorpusSettings("character", held_out=0.2, shard_tokens=1000)
    write_corpus([write(tmp_path / "source")], tmp_path / "out", recipe, workers=1)
    return lambda **keywords: Tokens(path=str(tmp_path / "out"), **keywords)


def scored(task: Tokens, length: int = 40) -> list[int]:
    targets = torch.cat([batch.targets.flatten() for batch in task.held_out(length)])
    return targets[targets != IGNORE].tolist()


def test_training_reads_the_training_documents_alone(make: Callable[..., Tokens]) -> None:
    task = make(length=30, documents="separate")
    texts = [path.read_text() for path in (task.corpus.folder.parent / "source").iterdir()]
    held_out = task.corpus.splits["held_out"].names
    named = {f"source/{number}.txt" for number in range(30)} - set(held_out)
    trained = [t for t in texts if any(t == _text(task, name) for name in named)]
    for row in task.train_batch(0).tokens.tolist():
        assert any(task.tokenizer.decode(row) in text for text in trained)


def _text(task: Tokens, name: str) -> str:
    return (task.corpus.folder.parent / name).read_text()


def test_all_held_out_tokens_but_the_first_are_scored(make: Callable[..., Tokens]) -> None:
    task = make(length=30)
    text = "".join(_text(task, name) for name in task.corpus.splits["held_out"].names)
    assert task.tokenizer.decode(scored(task)) == text[1:]


def test_separate_documents_are_scored_each_but_for_its_first_token(
    make: Callable[..., Tokens],
) -> None:
    task = make(length=30, documents="separate")
    text = "".join(_text(task, name)[1:] for name in task.corpus.splits["held_out"].names)
    assert task.tokenizer.decode(scored(task)) == text


@pytest.mark.parametrize("documents", ["join", "separate"])
@pytest.mark.parametrize("most", [10**6, 700, 100, 2])
def test_bytes_per_token_are_those_of_the_text_that_is_scored(
    make: Callable[..., Tokens], documents: str, most: int
) -> None:
    task = make(length=30, documents=documents, held_out_tokens=most)
    text = "".join(_text(task, name) for name in task.corpus.splits["held_out"].names)[:most]
    assert task.bytes_per_token == pytest.approx(len(text.encode()) / len(text))
    assert task.describe()["held_out_bytes"] == len(text.encode())
    assert task.describe()["held_out_tokens"] == len(text)


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary_per_token(
    make: Callable[..., Tokens],
) -> None:
    task = make(length=30)
    model = LanguageModel(ModelConfig("h3", task.vocab_size, d_model=8))
    torch.nn.init.zeros_(model.embedding.weight)
    wanted = np.log2(task.vocab_size) / task.bytes_per_token
    assert evaluate(model, task, 30, batches=0) == {
        "bits_per_byte": pytest.approx(wanted),
        "perplexity": pytest.approx(task.vocab_size),
    }


def test_the_baselines_are_those_of_the_text_task(tmp_path: Path) -> None:
    contents = random.Random(0).choices("the quick brown", k=5000)
    (tmp_path / "text").write_text("".join(contents))
    write_corpus([tmp_path / "text"], tmp_path / "out", CorpusSettings("character"), workers=1)
    texts = Text(path=str(tmp_path / "text")), Tokens(path=str(tmp_path / "out"))
    assert texts[0].baselines() == texts[1].baselines()


def test_the_baselines_do_not_count_names_of_tokens_as_text(tmp_path: Path) -> None:
    package = pytest.importorskip("tokenizers")
    letters = package.pre_tokenizers.ByteLevel.alphabet()
    numbers = {letter: number for number, letter in enumerate(letters)}
    made = package.Tokenizer(package.models.BPE(numbers, []))
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    drawn = random.Random(0)
    texts = ["".join(drawn.choices("abcdefgh", k=20)) for _ in range(400)]  # 3 bits per byte
    (tmp_path / "texts.jsonl").write_text("\n".join(f'{{"text": "{text}"}}' for text in texts))
    recipe = CorpusSettings(str(tmp_path / "tokenizer.json"), end_of_text=True, held_out=0.5)
    write_corpus([tmp_path / "texts.jsonl"], tmp_path / "out", recipe, workers=1)
    assert all(bits > 3 for bits in Tokens(path=str(tmp_path / "out")).baselines().values())


def test_joined_documents_follow_each_other_in_consecutive_batches(
    make: Callable[..., Tokens],
) -> None:
    task = make(length=20, batch_size=2)
    whole = task.corpus.splits["train"].text.joined()
    text = task.tokenizer.decode(whole.read(0, len(whole)))
    rows = torch.cat([task.consecutive_batch(index).tokens for index in range(50)], dim=1)
    assert all(task.tokenizer.decode(row) in text for row in rows.tolist())


def test_separate_documents_begin_anew_in_consecutive_batches(make: Callable[..., Tokens]) -> None:
    task = make(length=20, batch_size=2, documents="separate")
    begins = {_text(task, name)[:20] for name in task.corpus.splits["train"].names}
    batches = [task.consecutive_batch(index) for index in range(1, 40)]
    fresh = [row for batch in batches for row in batch.tokens[batch.fresh].tolist()]
    assert len(fresh) > 4
    assert all(task.tokenizer.decode(row) in begins for row in fresh)


def test_the_description_tells_what_is_scored_and_on_what(make: Callable[..., Tokens]) -> None:
    told = make(length=30, held_out_tokens=400).describe()
    assert told["n_documents"] == 30
    assert len(told["held_out_files"]) == 2
    assert told["newlines"] == "unify"
    assert told["training_bytes"] > told["training_tokens"]


def test_the_name_of_the_task_may_have_its_keywords(make: Callable[..., Tokens]) -> None:
    path = make().corpus.folder
    task = make_task(f"tokens(path={path}, documents=separate, length=32, longest=300)")
    assert task.eval_lengths == (32, 64, 128, 256, 300)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"length": 0}, "wants length to be int of at least 1, got 0"),
        ({"batch_size": 0}, "wants batch_size to be"),
        ({"held_out_tokens": 1}, "wants held_out_tokens to be int of at least 2, got 1"),
        ({"longest": 100}, "longest must be at least the training length, got longest=100"),
        ({"length": 10**5}, "must give 100001 tokens in a row to train on and 2 to hold out"),
    ],
)
def test_sizes_that_are_impossible_are_refused(
    make: Callable[..., Tokens], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make(**keywords)


def test_an_unknown_way_to_join_is_refused(make: Callable[..., Tokens]) -> None:
    with pytest.raises(InputError, match="one of join, separate, pack, got 'cut'"):
        make_task(f"tokens(path={make().corpus.folder}, documents=cut)")


def test_a_corpus_without_held_out_documents_is_refused(tmp_path: Path) -> None:
    write_corpus(
        [write(tmp_path / "source")], tmp_path / "out", CorpusSettings(held_out=0.0), workers=1
    )
    with pytest.raises(InputError, match="it has train: make it with --held_out above 0"):
        Tokens(path=str(tmp_path / "out"))


def test_a_missing_corpus_is_refused() -> None:
    with pytest.raises(InputError, match=r"no corpus in nowhere: index.json is missing"):
        make_task("tokens(path=nowhere)")
