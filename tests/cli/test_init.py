"""``stateline train --init``: a run that starts from the weights of a model of any kind."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stateline.cli import main
from stateline.compare.recipe import Recipe, read_models, read_recipe
from stateline.data import ByteTokenizer
from stateline.data.tokenizer import CharacterTokenizer
from stateline.errors import InputError
from stateline.generate.runs import weights_hash
from stateline.models.checkpoint import load_any, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.sequence_head import ClassifierConfig, RegressorConfig
from stateline.runs.initial import (
    as_in_folder,
    check_tokenizer,
    new_tensors,
    start_from,
    start_in_words,
)
from tests.tasks.small_data import task_on

ATTENTION = ("attention", "sliding_attention")
ONE_STEP = ["--train.steps", "1", "--train.lr", "1e-12", "--train.weight_decay", "0"]


def test_heads_that_stay_are_no_new_weights(tmp_path: Path) -> None:
    old = ModelConfig("attention(position=rope)", vocab_size=8, d_model=16)
    save_model(LanguageModel(old), tmp_path / "old")
    kept = "attention(n_heads=1, n_kv_heads=1, d_head=4, position=rope)"
    new = replace(old, pattern=f'parallel({kept}, retention, keeps="2")')
    told = start_in_words(new, str(tmp_path / "old"))
    assert "core.layers.1.out_proj.weight of layer 0" in told
    assert "core.layers.0." not in told


def test_it_is_told_how_replaced_layers_begin(tmp_path: Path) -> None:
    old = ModelConfig("attention(n_heads=2)*5", vocab_size=8, d_model=16)
    save_model(LanguageModel(old), tmp_path / "old")
    delta = "gated_delta_net(n_heads=2, d_key=8, expand_v=1)"
    others = "gated_delta_net(n_heads=4, expand_v=1) lstm feed_forward"
    new = replace(old, pattern=f"{delta} {others} {delta} attention")
    told = start_in_words(new, str(tmp_path / "old"))
    assert told.split("; ")[1] == (
        "fitted outputs of layers 0 and 1 and 3, unfitted outputs of layer 2, "
        "old queries, keys and values of layers 0 and 3, other settings of layer 4"
    )


@pytest.fixture
def recordings(tmp_path: Path) -> str:
    """The task to predict the next values of recordings with two channels."""
    for part in ("train", "test"):
        (tmp_path / "next" / part).mkdir(parents=True)
        for number in range(4):
            x = np.random.default_rng(number).normal(size=(9, 2))
            np.save(tmp_path / "next" / part / f"{number}.npy", x)
    return f'signals(path="{tmp_path / "next"}", target=next, loss=l1, batch_size=2)'


def train(*arguments: str) -> int:
    return main(["train", *arguments, *ONE_STEP, "--device", "cpu"])


def test_what_predicted_the_next_values_is_trained_to_classify(
    recordings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    assert train("lstm", "--task", recordings, "--model.d_model", "8", "--out", str(first)) == 0
    classes = task_on("signals", tmp_path)
    changed = ["--model.residual_dropout", "0.2", "--train.seed", "1"]
    assert train(str(first), "--task", classes, "--out", str(then), *changed) == 0
    new = "new weights: head.weight, head.bias"
    assert f"starting from the weights in {first}; {new}" in capsys.readouterr().out
    assert_all_but_the_head_is_taken(first, then)


def assert_all_but_the_head_is_taken(first: Path, then: Path) -> None:
    """Although the heads have the same shape: two values, two classes."""
    wanted, found = (load_any(folder).state_dict() for folder in (first, then))
    for name, tensor in found.items():
        same = torch.allclose(tensor, wanted.get(name, tensor + 1), rtol=0, atol=1e-9)
        assert same == (name != "head.weight") or name == "head.bias", name


def test_a_language_model_becomes_a_classifier_of_bytes(tmp_path: Path) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    (tmp_path / "book.txt").write_text("one two three " * 400)
    text = f'text(path="{tmp_path / "book.txt"}", length=8, batch_size=2, longest=8)'
    assert train("lstm", "--task", text, "--model.d_model", "8", "--out", str(first)) == 0
    reviews = task_on("byte_text", tmp_path, max_len=20)
    assert train(str(first), "--task", reviews, "--out", str(then)) == 0
    assert_all_but_the_head_is_taken(first, then)


def replaced(folder: Path) -> tuple[str, set[str]]:
    """A task for a model of two attention layers in a folder, and what it lacks with H3 in it."""
    config = ModelConfig(
        "attention*2", vocab_size=256, d_model=8, layers={"attention": {"n_heads": 2}}
    )
    save_model(LanguageModel(config), folder / "first")
    (folder / "book.txt").write_text("one two three " * 400)
    layer = LanguageModel(replace(config, pattern="h3")).stack.layers[0].layer
    new = {f"stack.layers.2.layer.{name}" for name in layer.state_dict()}
    task = f'text(path="{folder / "book.txt"}", length=8, batch_size=2, longest=8)'
    return task, new


@pytest.mark.parametrize("way", ["folder", "recipe", "option"])
def test_layers_of_the_first_model_can_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    task, new = replaced(tmp_path)
    first, then, recipe = (str(tmp_path / name) for name in ("first", "then", "recipe.yaml"))
    layers = "h3" if way == "option" else "attention h3"
    Path(recipe).write_text(f"pattern: {layers}\ntask: '{task}'\n")
    pattern = [] if way == "recipe" else ["--pattern", "attention h3"]
    start = [first, "--task", task] if way == "folder" else [recipe, "--init", first]
    assert train(*start, *pattern, "--out", then) == 0
    told = capsys.readouterr().out
    said = told.partition("new weights: ")[2].partition("\n")[0].split(", ")
    assert {f"stack.layers.2.layer.{name.removesuffix(' of layer 1')}" for name in said} == new
    wanted, found = (load_any(Path(folder)) for folder in (first, then))
    assert found.config == replace(wanted.config, pattern="attention h3")
    weights = wanted.state_dict()
    for name, tensor in found.state_dict().items():
        if name not in new:
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-9)
    assert train(str(Path(then) / "config.yaml"), "--print_config") == 0
    assert "pattern: attention h3\n" in capsys.readouterr().out


def test_layers_are_replaced_in_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, _ = replaced(tmp_path)
    start = [str(tmp_path / "first"), "--task", task, "--out", str(tmp_path / "then")]
    assert train(*start, "--pattern", "attention mamba") == 2
    message = "do not stand in the places of those of the model in"
    assert message in capsys.readouterr().err
    assert train(*start, "--pattern", "mamba attention mamba") == 2
    assert message in capsys.readouterr().err
    assert train(*start, "--pattern", "attention h3", "--model.layers", "{h3: {d_state: 16}}") == 2
    assert "give settings of new layers in the pattern, as in h3(d_s" in capsys.readouterr().err
    assert train(*start, "--pattern", "attention mamba feed_forward") == 0


def test_a_text_of_other_tokens_than_those_of_the_first_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, _ = replaced(tmp_path)
    first, then = tmp_path / "first", tmp_path / "then"
    for tokenizer, code in ((ByteTokenizer(), 0), (CharacterTokenizer("abc"), 2)):
        tokenizer.save(first / "tokenizer.json")
        assert train(str(first), "--task", task, "--out", str(then), "--dry_run") == code
    compare = ["compare", str(first), "--tasks", task, "--out", str(then), "--device", "cpu"]
    assert main(compare) == 2
    message = f"tokenizer of the model in {first}: token 0 is 'a' there, but '\\x00' in the task"
    assert capsys.readouterr().err.count(message) == 2


def test_all_tokens_of_a_text_and_of_the_first_model_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers of byte-level BPE have the first 256 in common."""
    save_model(LanguageModel(ModelConfig("attention", 2001, 8)), tmp_path)
    characters = "".join(map(chr, range(256, 2256)))
    CharacterTokenizer(f"{characters}a").save(tmp_path / "tokenizer.json")
    tasks = [
        SimpleNamespace(has_text=True, tokenizer=CharacterTokenizer(characters + last))
        for last in ("", "a", "b")
    ]
    check_tokenizer(tasks[0], str(tmp_path))
    with pytest.raises(InputError, match="token 2000 is 'a' there, but 'b' in the task"):
        check_tokenizer(tasks[2], str(tmp_path))
    monkeypatch.setattr(CharacterTokenizer, "decode", None)
    check_tokenizer(tasks[1], str(tmp_path))  # the same file needs no comparison


CHECKPOINT = "checkpoints/step-00000001"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options that continue the run ``then``, which starts from ``first`` and not ``other``."""
    task, _ = replaced(tmp_path)
    monkeypatch.chdir(tmp_path)
    save_model(LanguageModel(load_any(Path("first")).config), Path("other"))
    Path("then", CHECKPOINT).mkdir(parents=True)
    Path("then/config.yaml").write_text("init: first\n")
    return ["--task", task, "--out", "then", "--resume"]


@pytest.mark.parametrize(
    ("init", "words"),
    [
        ("other", "the weights in first, not from the weights in other"),
        ("", "the weights in first"),
    ],
)
def test_a_run_that_starts_from_another_model_is_not_continued(
    planted: list[str], capsys: pytest.CaptureFixture[str], init: str, words: str
) -> None:
    recipe = Path("then/config.yaml").read_text()
    assert train(*([init] if init else ["attention*2"]), *planted) == 2
    assert f"the run in then starts from {words}" in capsys.readouterr().err
    assert Path("then/config.yaml").read_text() == recipe


@pytest.mark.parametrize("before", ["first/", "second", "gone"])
def test_the_model_that_a_run_starts_from_may_be_named_in_another_way(
    planted: list[str], capsys: pytest.CaptureFixture[str], before: str
) -> None:
    """From another working directory, or after it was moved."""
    shutil.copytree("first", "second")
    Path("then/config.yaml").write_text(f"init: {before}\n")
    assert train("first", *planted) == 2
    assert f"{CHECKPOINT} is damaged" in capsys.readouterr().err  # it is empty


def test_random_weights_are_not_the_model_in_the_working_directory(
    planted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("then/config.yaml").write_text("init: ''\n")
    planted[planted.index("then")] = str(Path("then").absolute())
    monkeypatch.chdir("first")
    assert train(".", *planted) == 2
    assert "starts from random weights, not from the weights in ." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"embedding_dropout": 0.1, "residual_dropout": 0.2, "init": "h3"}),
        ({}, {"vocab_size": 5}),  # the embedding keeps its rows
        ({"block": "parallel"}, {"pattern": "h3"}),
        (
            {"pattern": "attention feed_forward", "feed_forward": "none"},
            {"pattern": "h3 channel_mixing"},
        ),
    ],
)
def test_what_may_differ_from_the_first_model(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any]
) -> None:
    config = replace(ModelConfig("attention", 9, 8), **first)
    save_model(LanguageModel(config), tmp_path / "first")
    wanted = replace(config, **then)
    found = as_in_folder(wanted, str(tmp_path / "first"))
    assert found == replace(wanted, vocab_size=9)


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({}, {"vocab_size": 10}, "the task has 10 tokens, but the model in .* 9: choose a token"),
        ({"block": "parallel"}, {"pattern": "mamba"}, "do not stand in the places of those of"),
        ({}, {"tie_embeddings": False}, "tie_embeddings would be False, but in the model in .* Tr"),
    ],
)
def test_what_may_not_differ_from_the_first_model(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], message: str
) -> None:
    config = replace(ModelConfig("attention", 9, 8), **first)
    save_model(LanguageModel(config), tmp_path / "first")
    with pytest.raises(InputError, match=message):
        as_in_folder(replace(config, **then), str(tmp_path / "first"))


def test_settings_of_outputs_are_those_of_the_task(tmp_path: Path) -> None:
    config = ModelConfig("attention", 9, 8, tie_embeddings=False, head_bias=True)
    save_model(LanguageModel(config), tmp_path / "first")
    classes = ClassifierConfig("attention", d_model=8)
    assert as_in_folder(classes, str(tmp_path / "first")) == classes


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "weights.pt"])
def test_the_hash_of_weights_is_of_all_their_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.bin").mkdir()

    def hashed(weights: str, config: str = "") -> str:
        (tmp_path / name).write_text(weights)
        (tmp_path / "config.json").write_text(config)
        return weights_hash(str(tmp_path))

    assert hashed("first") != hashed("then") == hashed("then", "config")


@pytest.mark.parametrize("bias", [False, True])
def test_attention_becomes_attention_within_a_window_and_back(tmp_path: Path, bias: bool) -> None:
    patterns = [f"attention(position=rope, n_kv_heads=2, bias={bias})", "sliding_attention"]
    patterns[1] += patterns[0].removeprefix("attention").replace("(", "(window=99, ")
    x, settings = torch.arange(20)[None] % 9, {name: {"n_heads": 4} for name in ATTENTION}
    for there, here in (patterns, patterns[::-1]):
        config = ModelConfig(there, 9, 32, layers=settings)
        first, folder = LanguageModel(config), tmp_path / here[:4]
        save_model(first, folder)
        model = start_from(as_in_folder(replace(config, pattern=here), str(folder)), str(folder))
        assert new_tensors(model.config, config) == []
        torch.testing.assert_close(model(x), first(x))


@pytest.mark.parametrize(
    "pattern",
    [
        "sliding_attention(d_head=12)",
        "lightning_attention",
        "linear_attention",
        "latent_attention(d_head=16, d_latent=8)",
        "parallel(attention(n_heads=2, d_head=8), h3)",
    ],
)
def test_weights_of_another_kind_of_layer_are_not_taken(pattern: str) -> None:
    source = ModelConfig("attention", 9, 32)
    new = new_tensors(replace(source, pattern=pattern), source)
    lightning = replace(source, pattern="lightning_attention")
    assert new_tensors(lightning, lightning) == []
    assert "stack.layers.0.layer.q_proj.weight" in new_tensors(
        replace(source, pattern="sliding_attention"), lightning
    )
    layer = LanguageModel(replace(source, pattern=pattern)).stack.layers[0].layer
    wanted = {f"stack.layers.0.layer.{name}" for name in layer.state_dict()}
    assert set(new) == wanted


def test_a_comparison_replaces_layers_as_a_recipe_says(tmp_path: Path) -> None:
    replaced(tmp_path)
    recipe = tmp_path / "hybrid.yaml"
    recipe.write_text(f"init: {tmp_path / 'first'}\npattern: attention  h3\n")
    whole = str(tmp_path / "first")
    found = read_models([whole, read_recipe(recipe)[0], Recipe("h3*2", init=whole)])
    assert [(own.name, own.pattern, own.init) for own in found] == [
        ("first", "attention*2", whole),
        ("hybrid", "attention h3", whole),
        ("h3*2", "h3*2", whole),
    ]


def test_other_layers_are_refused(
    recordings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, then = str(tmp_path / "first"), tmp_path / "then"
    assert train("lstm", "--task", recordings, "--model.d_model", "8", "--out", first) == 0
    wider = ["--model.d_model", "16"]
    assert train(first, "--task", recordings, "--out", str(then), *wider) == 2
    message = f"d_model would be 16, but in the model in {first} it is 8: leave out options"
    assert message in capsys.readouterr().err
    assert not then.exists()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_weights_in_half_precision_are_trained_in_float32(tmp_path: Path, dropout: float) -> None:
    config = ModelConfig("lstm", 9, 8)
    save_model(LanguageModel(config).bfloat16(), tmp_path / "half")
    model = start_from(replace(config, residual_dropout=dropout), str(tmp_path / "half"))
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("scaled", [{"embedding_norm": True}, {"embedding_multiplier": 2.0}])
def test_embeddings_that_another_kind_of_model_would_not_scale_are_refused(
    tmp_path: Path, scaled: dict[str, Any]
) -> None:
    save_model(LanguageModel(ModelConfig("lstm", 9, 8, **scaled)), tmp_path / "scaled")
    config = ClassifierConfig("lstm", d_model=8)
    with pytest.raises(InputError, match="scales or normalises its embeddings, which a classifier"):
        as_in_folder(config, str(tmp_path / "scaled"))


def test_a_head_of_another_kind_pooling_or_size_is_new() -> None:
    source = RegressorConfig("lstm", d_model=8, n_channels=2, n_values=2, pooling="mean")
    classes = ClassifierConfig("lstm", d_model=8, n_channels=2, n_classes=2, pooling="mean")
    assert new_tensors(source, source) == []
    for other in (classes, replace(source, pooling="last"), replace(source, n_values=3)):
        assert new_tensors(other, source) == ["head.weight", "head.bias"]
