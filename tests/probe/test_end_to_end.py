"""Probes and SuperGLUE from the command line: a Pythia, a Mamba, an H3 and a model trained here."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.cli import main
from stateline.data import load_tokenizer
from stateline.evaluate.harness import LOCAL_TASKS
from stateline.evaluate.harness.superglue import RANKED
from stateline.evaluate.harness.tasks import detokenised
from stateline.models.config import ModelConfig
from stateline.models.convert.table import write_pretrained
from stateline.models.language_model import LanguageModel
from stateline.probe import PROBES
from tests.prepared import contents
from tests.test_harness import EXAMPLES, write_rows

pytestmark = [
    pytest.mark.slow,  # importing lm-eval and transformers takes seconds
    pytest.mark.usefixtures("unannotated"),
    pytest.mark.filterwarnings("default"),
]

QUESTIONS = [name for name in LOCAL_TASKS if name.removesuffix("_gen") in RANKED]
SIZES = {"phone_book": 3, "copy": 20, "shuffled_copy": 20, "letters": 9, "squad": 50}
SIZES |= {"ngram_lookup": 9, "dictionary": 5}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny: Path, sources: Path) -> Path:
    """Models and data of all kinds."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(sources, home / "data")
    for name in ("pythia", "mamba"):
        shutil.copytree(tiny / name, home / name)
    for name, rows in EXAMPLES.items():
        for split in ("train", "val"):
            write_rows(home / "data" / name / f"{split}.jsonl", rows * 3)
    write_rows(home / "data" / "lambada" / "test.jsonl", [{"text": "the cat and the dog"}])
    (home / "data" / "wikitext-2").mkdir()
    (home / "data" / "wikitext-2" / "test.txt").write_text(" \n = One = \n \n A state . \n")
    torch.manual_seed(0)
    config = ModelConfig(
        "h3 attention", 320, 128, layers={"attention": {"bias": True, "n_heads": 4}}
    )
    write_pretrained(LanguageModel(config).eval(), home / "h3", "h3")
    shutil.copy(tiny / "pythia" / "tokenizer.json", home / "text.json")
    task = f"text(path={sources / 'text' / 'play.txt'}, length=16, batch_size=2)"
    train = ["train", "lstm", "--task", task, "--train.steps", "2", "--model.d_model", "16"]
    assert main([*train, "--out", str(home / "mine"), "--device", "cpu"]) == 0
    return home


@pytest.fixture(autouse=True)
def there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def evaluate(*words: str) -> dict[tuple[str, str], float]:
    """Scores by task and name of the metric."""
    given = ["--data", "data", "--device", "cpu", "--out", "scores.json"]
    assert main(["evaluate", *words, *given]) == 0
    scores = json.loads(Path("scores.json").read_text())["scores"]
    return {(score["task"], score["name"]): score["value"] for score in scores}


MODELS = {
    "mine": ["mine"],
    "pythia": ["pythia"],
    "mamba": ["mamba"],
    "h3": ["h3/model.pt", "--tokenizer", "text.json"],
}


@pytest.mark.parametrize("shots", ["0", "3"])
@pytest.mark.parametrize("model", MODELS)
def test_all_tasks_of_superglue_run(model: str, shots: str) -> None:
    scores = evaluate(*MODELS[model], "--tasks", *QUESTIONS, "--shots", shots, "--limit", "2")
    assert {task for task, _ in scores} == set(QUESTIONS)
    assert all(0 <= value <= 1 for value in scores.values())
    metrics = {name for task, name in scores if task == "multirc_gen"}
    assert metrics == {"acc", "f1a", "em"}


@pytest.mark.parametrize("model", MODELS)
def test_texts_and_probes_run_as_tasks(model: str) -> None:
    probes = [f"{name}_{size}" for name, size in SIZES.items()]
    scores = evaluate(*MODELS[model], "--tasks", "lambada", "wikitext", *probes, "--limit", "1")
    assert {task for task, _ in scores} == {"lambada", "wikitext", *probes}
    assert scores["wikitext", "word_perplexity"] > 1


@pytest.mark.parametrize("model", ["mine", "pythia", "mamba", "hf:pythia", "hf:mamba"])
def test_all_probes_run(model: str, tmp_path: Path) -> None:
    for task, size in SIZES.items():
        sizes = ["--lengths", str(size), "--examples", "2", "--device", "cpu"]
        where = ["--data", "data", "--out", str(tmp_path)]
        assert main(["probe", model, "--tasks", task, *sizes, *where]) == 0
    points = json.loads((tmp_path / "probes.json").read_text())["points"]
    assert {point["task"] for point in points} == set(PROBES)


@pytest.mark.parametrize("model", ["pythia", "mamba"])
def test_perplexity_per_word_is_that_of_transformers(
    model: str, request: pytest.FixtureRequest
) -> None:
    """The first two articles of WikiText-2, where its files are at hand."""
    transformers = pytest.importorskip("transformers")
    source: Path = request.config.getoption("--data") / "text" / "wikitext-2"
    file = next(source.rglob("*test*"), None)
    if file is None:
        pytest.skip(f"no WikiText-2 in {source}")
    text = file.read_text(encoding="utf-8")
    titles = [m.start() for m in re.finditer(r"^ = [^=].* = $", text, flags=re.MULTILINE)]
    kept = [text[: titles[0]] + text[titles[0] : titles[1]], text[titles[1] : titles[2]]]
    short = [article[:1500] for article in kept]
    Path("data/wikitext-2/test.txt").write_text("".join(short), encoding="utf-8")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = load_tokenizer(f"{model}/tokenizer.json")
    total, words = 0.0, 0
    for article in re.split(r"\n(?= = [^=].* = $)", "".join(short), flags=re.MULTILINE):
        if not article.strip():
            continue
        written = detokenised(article)
        tokens = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode(written)]])
        with torch.no_grad():
            logits = theirs(tokens[:, :-1]).logits.double()
        total += float(torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="sum"))
        words += len(article.split()) + article[0].isspace() + article[-1].isspace()
    found = evaluate(model, "--tasks", "wikitext")["wikitext", "word_perplexity"]
    assert found == pytest.approx(math.exp(total / words), rel=1e-4)


class Harm:
    """What a pickle would call."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"x": Harm()}, folder / "pytorch_model.bin")


def with_code(folder: Path) -> None:
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config = {"model_type": "evil", "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("from pathlib import Path\nPath('harm').touch()\n")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a pickle that calls": pickled,
    "code": with_code,
    "weights that are none": lambda f: (f / "model.safetensors").write_bytes(b"none"),
    "half of the weights": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-5000]
    ),
    "a tokenizer that is none": lambda f: (f / "tokenizer.json").write_text("{"),
    "a configuration that is none": lambda f: (f / "config.json").write_text("[1]"),
}
COMMANDS = (
    "probe bad --tasks letters --lengths 5",
    "probe hf:bad --tasks letters --lengths 5",
    "evaluate bad --tasks boolq --data data",
    "check hf:bad",
    "convert bad new",
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_wrong_or_malicious_folder_is_one_line_and_does_nothing(
    damage: str,
    command: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "tokenizer" in damage and command.split()[0] in ("check", "convert"):
        pytest.skip("the command reads no tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    shutil.copytree(home / "pythia", "bad")
    shutil.copytree(home / "data", "data")
    DAMAGES[damage](Path("bad"))
    before = contents(Path())
    capsys.readouterr()
    assert main(command.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert contents(Path()) == before
