from pathlib import Path
from typing import Any

import pytest
import torch

from stateline import check_layer
from stateline.errors import InputError
from stateline.models.checkpoint import load_classifier, load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.sequence_head import ClassifierConfig, SequenceClassifier

NUMBERS = ClassifierConfig("lstm attention", d_model=8, n_channels=3, n_classes=4)
TOKENS = ClassifierConfig("s4d", d_model=8, vocab_size=7, n_classes=4, pooling="last")


def new_model(config: ClassifierConfig = NUMBERS) -> SequenceClassifier:
    torch.manual_seed(0)
    return SequenceClassifier(config).double().eval()


@pytest.mark.parametrize("config", [NUMBERS, TOKENS, ClassifierConfig("h3", max_len=64)])
def test_a_classifier_obeys_the_law(config: ClassifierConfig) -> None:
    report = check_layer(new_model(config))
    assert report.ok, str(report)


def test_what_fills_up_a_row_has_no_part_in_its_answer() -> None:
    model = new_model()
    x = model.example_input(2, 9)
    x[1, 5:] = 1e6
    alone = [model.classify(x[:1]), model.classify(x[1:, :5])]
    together = model.classify(x, torch.tensor([9, 5]))
    torch.testing.assert_close(together, torch.cat(alone))


def test_mean_pooling_is_the_mean_over_positions() -> None:
    model = new_model()
    x = model.example_input(2, 6)
    assert model.encoder is not None
    h = model.norm(model.stack(model.encoder(x)))
    torch.testing.assert_close(model.classify(x), model.head(h.mean(dim=1)))


def test_last_pooling_looks_at_the_last_position_alone() -> None:
    model = new_model(TOKENS)
    x = model.example_input(2, 6)
    assert model.embedding is not None
    h = model.norm(model.stack(model.embedding(x)))
    torch.testing.assert_close(model.classify(x), model.head(h[:, -1]))


def test_a_stream_is_classified_while_it_comes() -> None:
    model = new_model()
    x, state = model.example_input(2, 6), model.init_state(2)
    for place in range(6):
        logits, state = model.step(x[:, place], state)
        torch.testing.assert_close(logits, model.classify(x[:, : place + 1]))


def test_numbers_enter_with_their_own_size() -> None:
    model = SequenceClassifier(ClassifierConfig("lstm", d_model=512, n_channels=32))
    assert model.encoder is not None
    entered = model.encoder(torch.randn(64, 1, 32))
    assert entered.std().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.cpu
@pytest.mark.parametrize("config", [NUMBERS, TOKENS])
def test_a_loaded_classifier_gives_the_same_logits_to_the_bit(
    tmp_path: Path, config: ClassifierConfig
) -> None:
    model = new_model(config)
    save_model(model, tmp_path)
    loaded, x = load_classifier(tmp_path), model.example_input(2, 5)
    assert loaded.config == config
    assert loaded(x).equal(model(x))


def test_a_classifier_is_not_read_as_a_language_model(tmp_path: Path) -> None:
    save_model(new_model(), tmp_path)
    with pytest.raises(
        InputError, match="is a classifier, not a language model: load_classifier reads it"
    ):
        load_model(tmp_path)


def test_a_language_model_is_not_read_as_a_classifier(tmp_path: Path) -> None:
    save_model(LanguageModel(ModelConfig("lstm", vocab_size=5, d_model=8)), tmp_path)
    with pytest.raises(
        InputError, match="is a language model, not a classifier: load_model reads it"
    ):
        load_classifier(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_classes": 1}, "wants n_classes to be int from 2 to 16,777,216, got 1"),
        ({"n_channels": -1}, "wants n_channels to be"),
        ({"n_channels": 1 << 40}, "wants n_channels to be"),
        ({"n_classes": 1 << 40}, "wants n_classes to be"),
        ({"n_channels": 2, "vocab_size": 9}, "either tokens .* or numbers .*, got both"),
        ({"pooling": "first"}, "wants pooling to be one of mean, last, got 'first'"),
    ],
)
@pytest.mark.usefixtures("unannotated")
def test_settings_that_cannot_be_used_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ClassifierConfig("s4d", **settings)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("config", "x", "message"),
    [
        (
            NUMBERS,
            torch.zeros(2, 5),
            r"must be floating-point numbers of shape \(batch, length, 3\)",
        ),
        (NUMBERS, torch.zeros(2, 5, 2), r"got torch.float32 of \(2, 5, 2\)"),
        (NUMBERS, torch.zeros(2, 5, 3, dtype=torch.long), "got torch.int64"),
        (NUMBERS, torch.full((2, 5, 3), torch.nan), "must be finite, got NaN"),
        (NUMBERS, torch.full((2, 5, 3), torch.inf), "must be finite, got NaN"),
        (TOKENS, torch.zeros(2, 5, 3), r"must be tokens of shape \(batch, length\)"),
        (TOKENS, torch.zeros(2, 5), "tokens must be integers"),
        (TOKENS, torch.zeros(5, dtype=torch.long), r"\(batch, length\), got torch.int64 of \(5,\)"),
        (TOKENS, torch.zeros(2, 5).bool(), "int64 or int32, got torch.bool"),
        (NUMBERS, torch.zeros(3), r"\(batch, length, 3\), got torch.float32 of \(3,\)"),
        (TOKENS, torch.full((2, 5), 7), "tokens must be from 0 to 6"),
    ],
)
@pytest.mark.usefixtures("unannotated")
def test_input_of_another_kind_is_refused(
    config: ClassifierConfig, x: torch.Tensor, message: str
) -> None:
    model = SequenceClassifier(config)
    for read in (model, model.classify):
        with pytest.raises(InputError, match=message):
            read(x.cpu())


@pytest.mark.cpu
@pytest.mark.usefixtures("unannotated")
def test_a_step_takes_numbers_of_each_row() -> None:
    model = SequenceClassifier(NUMBERS)
    for x in (torch.zeros(()), torch.zeros(2, 5, 3)):
        with pytest.raises(InputError, match=r"shape \(batch, 3\), got torch.float32 of"):
            model.step(x, model.init_state(2))
    for sizes in ({"batch_size": -1}, {"batch_size": 2, "capacity": -1}):
        with pytest.raises(InputError, match="must be at least 0, got"):
            model.init_state(**sizes)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    "lengths", [[5], torch.tensor([5]), torch.tensor([5, 3, 1]), torch.tensor([5.0, 3.0]), [5, 3]]
)
def test_lengths_are_an_integer_of_each_row(lengths: Any) -> None:
    model = new_model()
    with pytest.raises(InputError, match="lengths must be an integer for each of the 2 rows"):
        model.classify(model.example_input(2, 5), lengths)


@pytest.mark.parametrize("lengths", [[0, 3], [3, 6]])
def test_lengths_beyond_the_input_are_refused(lengths: list[int]) -> None:
    model = new_model()
    with pytest.raises(InputError, match="lengths must be from 1 to 5"):
        model.classify(model.example_input(2, 5), torch.tensor(lengths))


def test_a_row_without_positions_has_no_class() -> None:
    model = new_model()
    with pytest.raises(InputError, match="at least one position, got none"):
        model.classify(model.example_input(2, 0))


def test_batch_normalisation_is_over_rows_and_positions_and_for_whole_rows_alone(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    settings = {"d_model": 8, "norm": "batch", "feed_forward": "none"}
    model = SequenceClassifier(ClassifierConfig("bidirectional(s4d)*2", 5, **settings))
    x, seen = torch.randint(5, (6, 7)), []
    model.norm.register_forward_hook(lambda *call: seen.append(call[2]))
    model(x)
    torch.testing.assert_close(seen[0].mean(dim=(0, 1)), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        seen[0].var(dim=(0, 1), unbiased=False), torch.ones(8), atol=1e-2, rtol=0
    )
    model.eval()
    torch.testing.assert_close(model(x)[:1], model(x[:1]))  # the running means, not the batch's
    save_model(model, tmp_path / "model")
    assert load_classifier(tmp_path / "model").eval()(x).equal(model(x))
    with pytest.raises(InputError, match="shows later positions to earlier ones in training"):
        SequenceClassifier(ClassifierConfig("s4d*2", 5, **settings))
