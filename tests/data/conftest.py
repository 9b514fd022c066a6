"""A small tokenizer and sources that tests of this part share."""

from collections.abc import Callable
from pathlib import Path

import pytest

TEXT = "Hé 😀 naïve 日本語, the theory of the thing\r\n"


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small byte-level BPE, trained here."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write files below a folder, which it returns; contents may be text or bytes."""

    def write_all(folder: str, **files: str | bytes) -> Path:
        root = tmp_path / folder
        for name, contents in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
        return root

    return write_all
