"""Models pass between our folders and those of transformers without a change."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stateline.cli import main
from stateline.data import ByteTokenizer, CharacterTokenizer, Tokenizer, load_tokenizer
from stateline.errors import InputError
from stateline.generate import generate, load_run
from stateline.layers import LAYERS
from stateline.layers.state import fingerprint
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from tests.hf.conftest import MIXED, Make, hf

pytestmark = pytest.mark.filterwarnings("default")

TEXT = "a state is\n\n\tä value éí 日本 \x00\r Ā end"


def read(folder: Path, **settings: object) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    assert hf.StatelineForCausalLM  # importing it registers the architecture
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


@torch.no_grad()
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": False, "max_len": 40}])
def test_a_saved_model_is_read_by_both_libraries(
    make: Make, tmp_path: Path, max_shard_size: str, settings: dict[str, object]
) -> None:
    model = make(**settings)
    hf.wrap(model).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "5GB")
    tokens = model.example_input(2, 9)
    assert torch.equal(read(tmp_path)(tokens, use_cache=False).logits, model(tokens))
    again = load_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(tokens), model(tokens))


@torch.no_grad()
def test_a_model_of_every_layer_is_read_again(make: Make, tmp_path: Path) -> None:
    model = make(" ".join(LAYERS))
    hf.wrap(model).save_pretrained(tmp_path)
    tokens = model.example_input(2, 9)
    assert torch.equal(read(tmp_path)(tokens, use_cache=False).logits, model(tokens))


@pytest.mark.parametrize("pattern", [MIXED, "s4d", "long_conv(filter_len=64)", "lstm", "s5", "gss"])
@torch.no_grad()
def test_half_precision_keeps_the_same_parameters_in_float32(
    make: Make, tmp_path: Path, pattern: str
) -> None:
    model = make(pattern)
    hf.wrap(model).save_pretrained(tmp_path)
    found, wanted = read(tmp_path, dtype=torch.bfloat16).model, model.bfloat16()
    for name, parameter in wanted.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name
    for name, buffer in wanted.named_buffers():
        torch.testing.assert_close(
            found.get_buffer(name).float(), buffer.float(), rtol=1e-2, atol=1e-2
        )
    tokens = wanted.example_input(2, 9)
    assert found(tokens).dtype == wanted(tokens).dtype == torch.bfloat16


@torch.no_grad()
def test_missing_tensors_get_new_values_and_the_others_are_kept(make: Make, tmp_path: Path) -> None:
    model = make()
    hf.wrap(model).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = [next(name for name in tensors if part in name) for part in ("qkv.weight", "a_log")]
    kept = {name: tensor for name, tensor in tensors.items() if name not in lost}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = dict(read(tmp_path).named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items() if name in found)
    std = found[lost[0]].std().item()
    assert std == pytest.approx((2 / (5 * 32)) ** 0.5, rel=0.1)
    fresh = LanguageModel(model.config).get_parameter(lost[1].removeprefix("model."))
    assert torch.equal(found[lost[1]], fresh)


def test_a_model_made_from_a_configuration_has_our_initial_values(make: Make) -> None:
    from transformers import AutoModelForCausalLM

    config = ModelConfig("attention mamba", vocab_size=61, d_model=32)
    torch.manual_seed(1)
    found = AutoModelForCausalLM.from_config(hf.StatelineConfig.of(config))
    torch.manual_seed(1)
    wanted = LanguageModel(config)
    assert found.config.model_config() == wanted.config
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_configuration_knows_the_names_of_transformers() -> None:
    config = hf.StatelineConfig(hidden_size=48, max_position_embeddings=64)
    assert (config.d_model, config.max_len) == (48, 64)
    assert config.model_config() == ModelConfig("h3", vocab_size=256, d_model=48, max_len=64)


@pytest.mark.parametrize(
    ("pattern", "number"), [("(h3*3 attention)*2 s4d", 9), ("ladder(h3*2) parallel(h3, s4d)*3", 4)]
)
def test_a_configuration_tells_the_number_of_layers(make: Make, pattern: str, number: int) -> None:
    config = hf.wrap(make(pattern)).config
    assert config.num_hidden_layers == number
    assert "num_hidden_layers" not in config.to_dict()
    given = config.to_dict() | {"num_hidden_layers": number}
    found = hf.StatelineConfig.from_dict(given, num_hidden_layers=number)
    found.update({"num_hidden_layers": number})
    assert found.to_dict() == config.to_dict()
    for settings in ({"num_hidden_layers": 2}, {}):
        with pytest.raises(InputError, match=rf"must be {number}, .*got 2: change pattern instead"):
            hf.StatelineConfig.from_dict(config.to_dict() | settings, num_hidden_layers=2)


def test_a_wrapped_model_shares_its_tensors(make: Make) -> None:
    model = make()
    wrapped = hf.wrap(model)
    assert wrapped.model is model
    assert {p.data_ptr() for p in wrapped.parameters()} == {
        p.data_ptr() for p in model.parameters()
    }


@torch.no_grad()
def test_a_device_map_places_the_model(make: Make, tmp_path: Path) -> None:
    model = make()
    hf.wrap(model).save_pretrained(tmp_path)
    found = read(tmp_path, device_map="auto")
    tokens = model.example_input(2, 9)
    torch.testing.assert_close(found(tokens).logits.cpu(), model(tokens), rtol=1e-4, atol=1e-4)


def test_more_tokens_can_be_added(make: Make) -> None:
    wrapped = hf.wrap(make("h3", tie_embeddings=False))
    wrapped.resize_token_embeddings(70)
    assert wrapped(torch.tensor([[69, 1]])).logits.shape == (1, 2, 70)
    assert wrapped.config.model_config().vocab_size == wrapped.model.config.vocab_size == 70


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_model(LanguageModel(ModelConfig("h3 attention", 256, 16)), tmp_path / "run")
    return tmp_path / "run"


def command(*arguments: object, code: int = 0) -> None:
    assert main(["export", *map(str, arguments)]) == code


def test_an_exported_run_works_in_a_pipeline_and_in_our_commands(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import pipeline

    command(run, tmp_path / "out")
    assert "tokenizer.json" in capsys.readouterr().out
    writer = pipeline("text-generation", model=str(tmp_path / "out"), device="cpu")
    texts = ["The state is", "A much longer prompt than the other one"]
    batch = writer(texts, max_new_tokens=8, do_sample=False, batch_size=2)
    own, tokenizer = load_run(run)
    for text, (found,) in zip(texts, batch, strict=True):
        (alone,) = writer(text, max_new_tokens=8, do_sample=False)
        prompt = torch.from_numpy(tokenizer.encode(text))[None]
        wanted = bytes(generate(own, prompt, 8)[0].tolist()).decode(errors="replace")
        assert found == alone
        assert found["generated_text"] == text + wanted
    again, same = load_run(tmp_path / "out")
    assert same.encode(TEXT).tolist() == list(TEXT.encode())
    tokens = own.example_input(1, 5)
    assert torch.equal(again(tokens), own(tokens))


def test_the_model_card_tells_size_state_and_scores(run: Path, tmp_path: Path) -> None:
    record = {
        "model": "h3",
        "task": "copying(max_len=20)",
        "seed": 0,
        "d_model": 16,
        "parameters": 1,
        "parameters_wanted": 1,
        "steps": 300,
        "stopped": "finished",
        "seconds": 1.0,
        "tokens_per_second": 1.0,
        "steps_to_solve": None,
        "curve": [],
        "by_length": {"20": {"accuracy": 0.4375}, "40": {"accuracy": None, "loss": 2.0}},
    }
    (run / "result.json").write_text(json.dumps({"format": "stateline-results-1", **record}))
    command(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    model = load_model(run)
    assert f"| parameters | {sum(p.numel() for p in model.parameters()):,} |" in card
    assert f"| 4,096 | {model.state_bytes(4096):,} |" in card
    assert "Trained on `copying(max_len=20)` for 300 updates" in card
    assert "| 20 | 0.4375 | \N{EN DASH} |\n| 40 | diverged | 2 |" in card
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert fingerprint(read.model)["weights"] in card
    read.model.embedding.weight.data[0] += 1
    assert fingerprint(read.model)["weights"] not in card


@pytest.mark.parametrize(("max_len", "lengths"), [(1024, ["256", "1,024"]), (100, ["100"])])
def test_the_model_card_tells_the_state_at_lengths_that_the_model_reads(
    max_len: int, lengths: list[str]
) -> None:
    from stateline.hf.card import card

    text = card(LanguageModel(ModelConfig("h3", 11, 16, max_len=max_len)))
    assert re.findall(r"^\| ([\d,]+) \| [\d,]+ \|$", text, re.MULTILINE) == lengths


def test_a_run_in_the_home_folder_is_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(run.parent))
    assert "model.safetensors" in hf.export(f"~/{run.name}", "~/exported")
    assert (run.parent / "exported" / "model.safetensors").exists()


def test_remote_code_finds_the_installed_package(run: Path, tmp_path: Path) -> None:
    command(run, tmp_path / "out", "--remote_code", "--dtype", "bfloat16")
    code = (tmp_path / "out" / "modeling_stateline.py").read_text()
    names: dict[str, object] = {}
    exec(compile(code, "modeling_stateline.py", "exec"), names)
    auto = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
    assert auto.keys() == {"AutoConfig", "AutoModelForCausalLM"}
    assert {value.partition(".")[2] for value in auto.values()} <= names.keys()
    assert load_model(tmp_path / "out").embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("size", ["5", "0", "lots", "-5MB", "nanMB", "5XB", ""])
def test_a_size_that_is_none_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    command(run, tmp_path / "out", f"--max_shard_size={size}", code=2)
    assert f"max_shard_size must be a size such as 500MB, got '{size}'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_not_touched(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    command(run, tmp_path / "out", code=2)
    assert "exists: choose another folder" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["byte", "character", "bpe"])
def test_tokenizers_give_the_same_tokens(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    own = own_tokenizer(kind, tmp_path)
    hf.tokenizer(own).save_pretrained(tmp_path / "saved")
    found = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert found(TEXT)["input_ids"] == own.encode(TEXT).tolist()
    assert found.decode(own.encode(TEXT)) == TEXT
    assert found.pad_token_id >= own.vocab_size
    assert found.eos_token_id == own.end_of_text
    batch = found([TEXT[:2], TEXT[:1]], padding=True)
    assert batch["attention_mask"][1][0] == 0
    written = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    assert (written["truncation"], written["padding"]) == (None, None)


@pytest.mark.parametrize("begins", [True, False])
def test_an_exported_tokenizer_begins_texts_as_the_runs_own(begins: bool, tmp_path: Path) -> None:
    import tokenizers
    from transformers import AutoTokenizer

    small_bpe(tmp_path)
    end = "<|endoftext|>"
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=[end, "$A"], special_tokens=[(end, 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    own = load_tokenizer(tmp_path) if begins else load_tokenizer(tmp_path).without_beginning()
    hf.tokenizer(own).save_pretrained(tmp_path / "saved")
    found = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert found(TEXT)["input_ids"] == own.prompt(TEXT).tolist()
    assert own.beginning == ((0,) if begins else ())
    assert found.bos_token_id == own.begin_of_text


def test_transformers_takes_no_tokenizer_of_the_family_of_a_converted_run(tmp_path: Path) -> None:
    """GPT-NeoX's has byte-level BPE without a normaliser."""
    import tokenizers
    from transformers import AutoTokenizer

    model = LanguageModel(ModelConfig("attention(position=rope)", 300, 16, block="parallel"))
    save_model(model, tmp_path / "run")
    small_bpe(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.save(str(tmp_path / "tokenizer.json"))
    own = load_tokenizer(tmp_path)
    own.save(tmp_path / "run" / "tokenizer.json")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "gpt_neox"]) == 0
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = TEXT.upper()
    assert found(text)["input_ids"] == own.encode(text).tolist()


def test_an_exported_tokenizer_writes_chats(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_model(LanguageModel(ModelConfig("h3", 300, 16)), tmp_path / "bpe")
    small_bpe(tmp_path / "bpe")
    (tmp_path / "bpe" / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    hf.export(tmp_path / "bpe", tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(chat, tokenize=False) == "<hi>"


@pytest.mark.parametrize(
    ("kind", "exported"), [("byte", False), ("byte", True), ("character", False), ("bpe", True)]
)
def test_transformers_reads_the_tokenizer_of_a_run_that_becomes_one_of_its_models(
    kind: str, exported: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own, run = own_tokenizer(kind, tmp_path), tmp_path / "run"
    model = LanguageModel(ModelConfig("mamba", own.vocab_size, 16, norm="rms"))
    save_model(model, run)
    own.save(run / "tokenizer.json")
    if exported:
        hf.export(run, tmp_path / "exported")
        run = tmp_path / "exported"
    assert main(["convert", str(run), str(tmp_path / "out"), "--to", "mamba-hf"]) == 0
    assert "\nwrote tokenizer.json, " in capsys.readouterr().out
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found(TEXT)["input_ids"] == own.encode(TEXT).tolist()
    assert found.decode(own.encode(TEXT)) == TEXT
    assert len(found) == own.vocab_size
    assert (found.pad_token_id, found.eos_token_id) == (None, own.end_of_text)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (written.generation_config.pad_token_id or 0) < own.vocab_size


def own_tokenizer(kind: str, folder: Path) -> Tokenizer:
    return {
        "byte": ByteTokenizer,
        "character": lambda: CharacterTokenizer.of([TEXT]),
        "bpe": lambda: small_bpe(folder),
    }[kind]()


def small_bpe(folder: Path) -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    made.enable_truncation(4)
    made.enable_padding(length=64)
    made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


def test_an_exported_model_ends_at_the_end_of_text_and_pads_with_another_token(
    tmp_path: Path,
) -> None:
    save_model(LanguageModel(ModelConfig("h3", 300, 16)), tmp_path / "bpe")
    own = small_bpe(tmp_path / "bpe")
    hf.export(tmp_path / "bpe", tmp_path / "out", max_shard_size="20KB")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found["eos_token_id"] == found["bos_token_id"] == own.end_of_text
    assert found["pad_token_id"] >= own.vocab_size
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_a_model_of_token_numbers_has_no_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(LanguageModel(ModelConfig("h3", 61, 16)), tmp_path / "run")
    with pytest.raises(InputError, match="reads token numbers"):
        hf.tokenizer(tmp_path / "run")
    command(tmp_path / "run", tmp_path / "out")
    assert "without a tokenizer" in capsys.readouterr().out
    assert read(tmp_path / "out").config.vocab_size == 61


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "lists no weights"),
        (lambda f: next(f.glob("model-00001*")).unlink(), "model-00001-of.* is missing"),
        (lambda f: next(f.glob("model-00002*")).write_bytes(b"no"), "is damaged"),
    ],
)
def test_a_damaged_folder_is_one_line(
    make: Make, tmp_path: Path, damage: Damage, message: str
) -> None:
    hf.wrap(make("h3")).save_pretrained(tmp_path, max_shard_size="20KB")
    damage(tmp_path)
    with pytest.raises(InputError, match=message):
        load_model(tmp_path)


@pytest.mark.usefixtures("unannotated")
def test_only_a_language_model_is_wrapped(make: Make) -> None:
    with pytest.raises(InputError, match="must be a LanguageModel of Stateline, got Stateline"):
        hf.wrap(hf.wrap(make("h3")))
