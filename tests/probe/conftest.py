"""A small data folder, and tiny models of transformers with a tokenizer."""

import json
from pathlib import Path

import pytest
import torch

TEXT = "to be or not to be, that is the question: whether it is nobler to suffer.\n" * 60


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for part in ("names", "text", "qa"):
        (folder / part).mkdir()
    for name, words in {
        "dist.female.first": ("MARY", "ANN", "EVE"),
        "dist.male.first": ("JOHN", "BOB"),
        "dist.all.last": ("SMITH", "LEE", "FOX", "RAY"),
    }.items():
        lines = [f"{word} {2.5 - i / 2} 0 {i}" for i, word in enumerate(words)]
        (folder / "names" / name).write_text("\n".join(lines))
    (folder / "text" / "play.txt").write_text(TEXT)
    questions = [
        {"question": f"What is {n}?", "answers": [{"text": f"the {n}"}, {"text": n}]}
        for n in ("one", "two", "three")
    ]
    questions.append({"question": "Impossible?", "answers": []})
    paragraphs = [{"context": "one two three " * n, "qas": questions} for n in (2, 3, 8)]
    paragraphs.append({"context": "short", "qas": questions[:1]})
    described = {"data": [{"paragraphs": paragraphs}]}
    (folder / "qa" / "dev.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``pythia`` and ``mamba``, with a tokenizer of bytes and a few merges."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    home = tmp_path_factory.mktemp("models")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    shared = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}
    ends = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    sizes = {"intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
    torch.manual_seed(0)
    for name, kind, settings in (
        ("pythia", "gpt_neox", {**sizes, "initializer_range": 0.3}),
        ("mamba", "mamba", {"state_size": 8}),
    ):
        config = transformers.AutoConfig.for_model(kind, **shared, **ends, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(home / name)
        tokenizer.save(str(home / name / "tokenizer.json"))
    return home
