"""GGUF files equal transformers' reading of them; their writer is that of the package gguf."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stateline.cli import main
from stateline.errors import InputError
from stateline.generate.runs import load_run, own_tokenizer, read_model_config
from stateline.models.convert.gguf import FREQUENCIES, GGUF
from stateline.models.convert.table import load_pretrained, read_pretrained
from tests.models.published import BASE, GPT, MAMBA, assert_near, tokens

gguf = pytest.importorskip("gguf", reason="writes the files")
transformers = pytest.importorskip("transformers", reason="reads the files, too")

pytestmark = pytest.mark.cpu  # transformers loads models

DECODER = {
    "context_length": 96,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500.0,
    "vocab_size": 61,
}
HEADS = {"attention.key_length": 16, "attention.value_length": 16}
GEMMA = {**DECODER, **HEADS, "attention.sliding_window": 5}
CAPS = {"attn_logit_softcapping": 0.25, "final_logit_softcapping": 1.5}
SIZES = {
    **BASE,
    "intermediate_size": 64,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": True,
}
GEMMAS = {**SIZES, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "llama",
        {**DECODER, "rope.dimension_count": 8},
        {**SIZES, "tie_word_embeddings": False},
    ),
    "qwen2": ("qwen2", DECODER, SIZES),
    "qwen3": ("qwen3", {**DECODER, **HEADS}, {**SIZES, "head_dim": 16}),
    "gemma2": ("gemma2", {**GEMMA, **CAPS}, {**GEMMAS, **CAPS}),
    "gemma3": ("gemma3_text", GEMMA, {**GEMMAS, "rope_parameters": ROPES}),
    "gpt2": (
        "gpt2",
        {
            "context_length": 48,
            "embedding_length": 32,
            "block_count": 2,
            "feed_forward_length": 128,
            "attention.head_count": 4,
            "attention.layer_norm_epsilon": 1e-5,
        },
        GPT,
    ),
    "mamba": (
        "mamba",
        {
            "context_length": 1 << 20,
            "embedding_length": 32,
            "block_count": 2,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 64,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 2,
            "vocab_size": 61,
        },
        {**MAMBA, "tie_word_embeddings": True},
    ),
}
"""Of each architecture: the ``model_type``, the fields of the file, and those of the sizes."""

TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:", "Ġ"]
TOKENS.append("he")


def write(
    path: Path,
    architecture: str,
    changes: dict[str, Any] | None = None,
    *,
    tokenizer: bool = False,
    extra: dict[str, Any] | None = None,
) -> Path:
    """A random model, quantised where the rows allow it."""
    kind, fields, sizes = FILES[architecture]
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**fields, **(changes or {})}.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(f"{architecture}.{name}", value)
    writer.add_eos_token_id(2)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
        writer.add_token_merges(["h e"])
        writer.add_bos_token_id(1)
        writer.add_unk_token_id(0)
        writer.add_chat_template("{{ messages[0]['content'] }}")
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table, random = gguf.get_tensor_name_map(kinds[architecture], 2), np.random.default_rng(0)
    for official, tensor in shapes.items():
        if official == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = table.get_name(official, (".weight", ".bias"))
        assert name, official
        shape = tuple(tensor.shape)
        if architecture == "gpt2" and ".weight" in name and "blk" in name:
            shape = shape[::-1]
        if name.endswith("conv1d.weight"):
            shape = (shape[0], shape[2])
        values = random.normal(size=shape).astype(np.float32) * (0.3 if len(shape) == 2 else 0.1)
        values = -np.exp(values) if name.endswith("ssm_a") else values
        if len(shape) == 2 and shape[-1] % 32 == 0 and "ssm" not in name:
            quantised = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, np.asarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FILES)
@torch.no_grad()
def test_a_file_is_the_model_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    """transformers gives the tensors; of the fields it does not read all."""
    path = write(tmp_path / "model.gguf", architecture)
    kind, _, sizes = FILES[architecture]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    read = import_module("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint
    tensors = read(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    left = theirs.load_state_dict({name: torch.as_tensor(t) for name, t in tensors.items()}, False)
    assert not left.unexpected_keys
    assert {*left.missing_keys} <= {"lm_head.weight"}
    theirs.tie_weights()
    found, x = read_pretrained(path), tokens()
    assert found.ignored == ()
    assert found.tokens["eos_token_id"] == 2
    logits = theirs(x).logits
    assert_near(found.model(x), logits)
    assert float(logits.std()) > 1e-2
    assert read_model_config(path) == found.model.config


GRANITE = {
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "logit_scale": 2.0,
    "rope.dimension_count": 8,
}
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}


@pytest.mark.parametrize(
    ("architecture", "fields", "sizes"),
    [
        ("gemma", {**DECODER, **HEADS}, {**SIZES, "head_dim": 16}),
        ("granite", {**DECODER, **GRANITE}, {**SIZES, **MULTIPLIERS}),
    ],
)
@torch.no_grad()
def test_a_model_that_was_written_as_by_llama_cpp_has_its_logits(
    architecture: str, fields: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    """transformers reads no such files: norms of Gemma hold 1 + w, Granite's q and k are turned."""
    config = transformers.AutoConfig.for_model(architecture, **sizes)
    transformers.set_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture], 2)
    for official, tensor in theirs.named_parameters():
        if architecture == "gemma" and "norm" in official:
            tensor = 1 + tensor
        if architecture == "granite" and ("q_proj" in official or "k_proj" in official):
            tensor = tensor.view(-1, 2, 4, 32).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(table.get_name(official, (".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    logits = theirs(tokens()).logits
    assert float(logits.std()) > 1e-2
    assert_near(load_pretrained(path)(tokens()), logits)


def test_the_scaled_positions_of_llama_3_are_read_from_their_divisors(tmp_path: Path) -> None:
    """In 8,192 positions, pairs that turn 4 times keep their speed; others lose up to a factor."""
    base, angles = {"rope.freq_base": 5e5}, 5e5 ** -(np.arange(4) / 4)
    kept = np.clip((8192 * angles / (2 * np.pi) - 1) / 3, 0, 1)
    divisors = 1 / (kept + (1 - kept) / 8)
    path = write(tmp_path / "a.gguf", "llama", base, extra={FREQUENCIES: divisors})
    assert "factor=8.0" in str(load_pretrained(path).config.layers["attention"]["position"])
    wrong = write(tmp_path / "b.gguf", "llama", base, extra={FREQUENCIES: [1, 2, 3, 4]})
    with pytest.raises(InputError, match="not Llama 3's for factor 4"):
        load_pretrained(wrong)


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({"expert_count": 8}, {}, "has llama.expert_count=8, which is not supported"),
        ({"attention.value_length": 4}, {}, "has llama.attention.value_length=4"),
        ({"rope.scaling.type": "longrope"}, {}, "scaled by 'longrope' are not supported"),
        ({"attention.head_count_kv": 3}, {}, "n_kv_heads must divide n_heads"),
        ({}, {"blk.0.attn_gate.weight": np.ones((4, 4))}, "blk.0.attn_gate.weight"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    changes: dict[str, Any], extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", "llama", changes, extra=extra)
    with pytest.raises(InputError, match=message) as caught:
        load_pretrained(path)
    assert "\n" not in str(caught.value)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "starcoder")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match="architecture 'starcoder': known in GGUF files are llama"):
        load_pretrained(tmp_path / "model.gguf")


def _cut(data: bytes, random: np.random.Generator) -> bytes:
    return data[: random.integers(len(data))]


def _flip(data: bytes, random: np.random.Generator) -> bytes:
    """Change bytes of the header."""
    changed = bytearray(data)
    for _ in range(random.integers(1, 4)):
        changed[random.integers(min(len(data), 2200))] = random.integers(256)
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.usefixtures("unannotated")  # the checks of annotations read tensors, too
@pytest.mark.parametrize("damage", [_cut, _flip])
def test_damaged_files_are_one_line(
    damage: Callable[[bytes, np.random.Generator], bytes], tmp_path: Path
) -> None:
    """A changed byte may leave a right file, with another name of the model or another number."""
    whole, path = write(tmp_path / "whole.gguf", "llama").read_bytes(), tmp_path / "damaged.gguf"
    random, told = np.random.default_rng(0), []
    for _ in range(30):
        path.write_bytes(damage(whole, random))
        try:
            load_pretrained(path)
        except InputError as error:
            told.append(str(error))
    assert not [text for text in told if "\n" in text]
    assert len(told) >= (30 if damage is _cut else 10)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"the package gguf: pip install 'stateline\[gguf\]'"):
        GGUF(path)


@pytest.mark.slow
def test_commands_take_a_file_with_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "model.gguf", "llama", tokenizer=True)
    official = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    model, text = load_run(path)
    words = "the cat: hehe</s> He"
    assert text.encode(words).tolist() == official(words)["input_ids"]
    assert set(text.end_tokens) == {2}
    assert main(["info", str(path)]) == 0
    assert "61" in capsys.readouterr().out
    assert main(["convert", str(path), str(tmp_path / "ours")]) == 0
    again, same = load_run(tmp_path / "ours")
    assert same.encode(words).tolist() == text.encode(words).tolist()
    assert torch.equal(again(tokens()), model(tokens()))
    assert main(["generate", str(path), "--prompt", "the", "--max_new_tokens", "3"]) == 0
    assert own_tokenizer(write(tmp_path / "numbers.gguf", "llama")) is None
