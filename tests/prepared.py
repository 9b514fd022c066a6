"""A folder with a valid file of every kind that commands read, for tests of broken input."""

import shutil
from pathlib import Path

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
TABLE = """\
paper: Nobody (2026)
place: table 1
claim: It is small.
columns: [{at: 16}, {at: 64, score: perplexity}, {count: seconds}]
rows: [{label: H3, recipe: recipe, train: {save_every: 1}, paper: [7.5, null]}]
sizes: {laptop: {cost: seconds}}
plot: length
"""
COPYING = "copying(n_letters=3, max_len=3, context_len=12, batch_size=2)"

MODELS = {
    "numbers": ModelConfig("h3(d_state=4)", 10, 8),
    "other": ModelConfig("h3(d_state=4)", 256, 8),
    "short": ModelConfig("attention", 256, 8, max_len=20),
}


def prepare() -> None:
    """Fill the current folder: a recipe and its run, a corpus, a kept state, models, texts."""
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


def prepare_more() -> None:
    """Add what only the fuzzer reads: runs that stopped half way, an export, rows, prompts."""
    shutil.copytree("run", "half")
    stop(Path("half"), 2)
    carrying = ["--train.carry_state", "true", "--train.steps", "2", "--train.save_every", "1"]
    assert main(["train", "recipe.yaml", *carrying, "--out", "carried"]) == 0
    stop(Path("carried"), 1)
    task = ["--task", COPYING, "--train.steps", "2", "--model.d_model", "8"]
    assert main(["train", "lstm", *task, "--out", "copier"]) == 0
    rows = [f'{{"text": "row {number} of a table"}}\n' for number in range(20)]
    Path("rows.jsonl").write_text("".join(rows))
    Path("splits.json").write_text('{"train": ["0.txt", "1.txt"], "held_out": ["2.txt"]}')
    Path("table.yaml").write_text(TABLE)
    Path("prompts").write_text("to be\nor not\n")
    Path("material/text").mkdir(parents=True)
    lines = [f'{{"text": "line {number} of a document"}}\n' for number in range(5)]
    Path("material/text/lines.jsonl").write_text("".join(lines))
    assert main(["export", "run", "exported"]) == 0


def stop(run: Path, step: int) -> None:
    """Remove what a run wrote after a step."""
    for path in run.glob("checkpoints/*"):
        if not path.name.endswith(f"-{step:08}"):
            shutil.rmtree(path)
    for name in ("config.json", "model.safetensors", "hashes.json", "result.json", "results.json"):
        (run / name).unlink()
    first, *_ = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(f"{first}\n")


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All files with their bytes, and folders."""
    return {
        path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))
    }
