"""Several texts with fixed shares of every batch."""

from pathlib import Path

import pytest
import torch

from stateline.data import write_corpus
from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Mixture, Text, Tokens
from stateline.train.config import TrainConfig
from stateline.train.loop import train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Texts of the letters a to m and of n to z, and a corpus of the second."""
    for name, first in (("one", 97), ("two", 110)):
        (tmp_path / name).write_bytes(bytes(first + n * n % 13 for n in range(4000)))
    write_corpus([tmp_path / "two"], tmp_path / "corpus", workers=1)
    return tmp_path


def mixture(folder: Path, texts: str = "one:1 two:3", seed: int = 0, **options: object) -> Mixture:
    paths = " ".join(f"{folder}/{word}" for word in texts.split())
    return Mixture(seed, texts=paths, length=16, batch_size=8, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("carry", [False, True])
def test_every_batch_has_the_rows_of_each_text_by_its_weight(folder: Path, carry: bool) -> None:
    task = mixture(folder)
    alone = Text(path=str(folder / "two"), length=16, batch_size=6)
    for index in (0, 3, 40):
        name = "consecutive_batch" if carry else "train_batch"
        batch, wanted = (getattr(of, name)(index) for of in (task, alone))
        assert (batch.tokens[:2] < 110).all()
        assert all(x[2:].equal(y) for x, y in zip(batch, wanted, strict=True))


def test_scores_are_those_of_each_text_and_their_mean_by_the_shares(folder: Path) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("lstm", 256, d_model=8)).eval()
    task = mixture(folder)
    one, two = (
        evaluate(model, Text(path=str(folder / name), length=16), 16)["bits_per_byte"]
        for name in ("one", "two")
    )
    scores = evaluate(model, task, 16)
    assert [*scores.values()] == pytest.approx([0.25 * one + 0.75 * two, one, two])
    assert scores.keys() == task.score_names()


def test_a_run_on_a_mixture_goes_on_to_the_bit(folder: Path, tmp_path: Path) -> None:
    def run(out: Path, until: int) -> LanguageModel:
        torch.manual_seed(0)
        model = LanguageModel(ModelConfig("lstm", 256, d_model=8))
        config = TrainConfig(steps=6, warmup_steps=0, eval_every=0, carry_state=True)
        steps = iter(range(1, 9))
        train(model, mixture(folder), config, folder=out, interrupted=lambda: next(steps) >= until)
        return model

    whole = run(tmp_path / "whole", 9)
    run(tmp_path / "cut", 2)
    again = run(tmp_path / "cut", 9)
    assert all(p.equal(q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))


def test_corpora_and_texts_mix_if_their_tokenizers_agree(folder: Path) -> None:
    kinds = [type(part) for part in mixture(folder, "corpus:1 one:1").parts]
    assert kinds == [Tokens, Text]


def test_validation_is_held_out_from_each_text(folder: Path) -> None:
    told = mixture(folder).hold_out_validation()
    assert told.count("held out from training") == 2


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ("one:1", "two or more paths"),
        ("one:1 two", "PATH:WEIGHT with a whole number above 0"),
        ("one:1 two:0.5", "PATH:WEIGHT with a whole number above 0"),
        ("one:1 two:2", "batch_size must be a multiple of 3, .* got 8: take 9"),
        ("one:1 three:3", "does not exist"),
    ],
)
def test_mistakes_are_named(folder: Path, texts: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        mixture(folder, texts)
