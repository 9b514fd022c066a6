"""What tests of broken input share: a folder with one of everything, and a way to be refused."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stateline.cli import main
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

RECIPE = """\
pattern: h3(d_state=4)
task: text(path=book.txt, length=16, batch_size=2)
model: {d_model: 8}
train: {steps: 4, save_every: 2}
"""

MODELS = {
    "numbers": ModelConfig("h3(d_state=4)", 10, 8),
    "other": ModelConfig("h3(d_state=4)", 256, 8),
    "short": ModelConfig("attention", 256, 8, max_len=20),
}

Refused = Callable[..., str]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, what it is trained on and its run; a corpus, a kept state, models, other files."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("book.txt").write_text("To be or not to be, that is the question. " * 40)
        Path("recipe.yaml").write_text(RECIPE)
        Path("source").mkdir()
        for number in range(4):
            Path(f"source/{number}.txt").write_text(f"document {number} of a source. " * 20)
        assert main(["train", "recipe.yaml", "--out", "run"]) == 0
        corpus = ["--out", "corpus", "--tokenizer", "character", "--workers", "1"]
        assert main(["data", "source", *corpus]) == 0
        kept = ["--prompt", "to", "--max_new_tokens", "3", "--save_state", "state"]
        assert main(["generate", "run", *kept]) == 0
        for name, config in MODELS.items():
            save_model(LanguageModel(config), name)
        Path("empty").mkdir()
        Path("file").write_text("")
        Path("noise").write_bytes(bytes(range(256)))
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all that, which is the current folder."""
    shutil.copytree(prepared, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def refused(
    unannotated: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Give a command that must fail: the one line that it says.

    No file is changed or removed, and what is new is named; without ``said``, nothing is printed.
    """

    def run(command: str, *, new: tuple[str, ...] = (), said: str = "") -> str:
        capsys.readouterr()
        before = contents(Path())
        assert main(shlex.split(command)) == 2
        shown = capsys.readouterr()
        after = contents(Path())
        assert before.items() <= after.items()
        found = after.keys() - before.keys()
        assert [path for path in found if not any(path.match(name) for name in new)] == []
        assert shown.out == "" or (said and shown.out.startswith(said))
        (line,) = shown.err.splitlines()
        assert line.startswith("stateline: error: ")
        return line.removeprefix("stateline: error: ")

    return run


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All files with their bytes, and folders."""
    return {
        path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))
    }
