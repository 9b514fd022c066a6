"""Damaged files: one line that names the file and what is wrong, and nothing else is harmed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

Damage = Callable[[], object]
Refused = Callable[..., str]


def put(name: str, contents: str | bytes) -> Damage:
    contents = contents.encode() if isinstance(contents, str) else contents
    return lambda: Path(name).write_bytes(contents)


def cut(name: str, size: int) -> Damage:
    return lambda: Path(name).write_bytes(Path(name).read_bytes()[:size])


def gone(name: str) -> Damage:
    return lambda: Path(name).unlink()


def instead(name: str, of: str) -> Damage:
    return lambda: shutil.copy(name, of)


def change(name: str, *keys: str | int, to: Any) -> Damage:
    """Another value at a place in a file of JSON."""

    def damage() -> None:
        record = inner = json.loads(Path(name).read_text())
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to
        Path(name).write_text(json.dumps(record))

    return damage


def alter(name: str, tensor: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Another tensor in a file of tensors, whose metadata stay."""

    def damage() -> None:
        with safe_open(name, framework="pt") as file:
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        (key,) = [key for key in tensors if tensor in key]
        tensors[key] = how(tensors[key]).contiguous()
        save_file(tensors, name, metadata=metadata)

    return damage


def nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan"))


NOISE = bytes(range(256))
DEEP = "[" * 100_000

RECIPE = "the recipe recipe.yaml"
RECIPES = [
    (gone("recipe.yaml"), "no such recipe: recipe.yaml"),
    (put("recipe.yaml", "pattern: [h3"), f"{RECIPE}: Problems parsing config: while parsing a flo"),
    (put("recipe.yaml", NOISE), f"{RECIPE}: 'utf-8' codec can't decode byte 0x80 in position 128"),
    (put("recipe.yaml", ""), f"{RECIPE} names no pattern: add a line such as h3*2"),
    (put("recipe.yaml", "- h3\n- lstm"), f"{RECIPE}: Unexpected config: - h3 - lstm"),
    (put("recipe.yaml", "task: copying"), f"{RECIPE} names no pattern: add a line such as h3*2"),
    (put("recipe.yaml", "pattern: h3\ncolour: red"), f"{RECIPE}: unknown option 'colour'"),
    (
        put("recipe.yaml", "train: {stepz: 3}"),
        "unknown option 'train.stepz': did you mean 'train.steps'?",
    ),
    (put("recipe.yaml", "train: {steps: many}"), f"{RECIPE}: train.steps must be int, got 'many'"),
    (put("recipe.yaml", "train: 3"), f"{RECIPE} must have settings in train, got 3"),
    (put("recipe.yaml", "pattern: [h3]"), f"{RECIPE}: pattern must be str or none, got"),
    (put("recipe.yaml", "pattern: h3)"), "expected a layer name at <here>: h3<here>)"),
    (put("recipe.yaml", "model: {norm: batch}"), "norm must be layer or rms or none, got 'batch'"),
    (put("recipe.yaml", "{pattern: h3, train: {lr: .nan}}"), "wants lr to be a finite number, got"),
    (put("recipe.yaml", "pattern: !!python/name:os.abort"), "could not determine a constructor"),
    (
        put("recipe.yaml", "{pattern: h3, model: {layers: {h3: {d_stat: 4}}}}"),
        "unknown keyword of layer 'h3' 'd_stat': did you mean 'd_state'?",
    ),
    (put("recipe.yaml", "{pattern: h3, task: text(path=nowhere)}"), "'nowhere', which does not ex"),
]

CONFIG, WEIGHTS = "run/config.json", "run/model.safetensors"
DAMAGED = "the model in run is damaged: "
MODELS = [
    (gone(WEIGHTS), "no model in run: model.safetensors is missing"),
    (cut(WEIGHTS, 0), f"{DAMAGED}Error while deserializing header: header too small; save or trai"),
    (cut(WEIGHTS, 5000), f"{DAMAGED}Error while deserializing header: "),
    (put(WEIGHTS, NOISE), f"{DAMAGED}Error while deserializing header: header too large"),
    (instead("numbers/model.safetensors", WEIGHTS), "do not fit its config.json: they differ in '"),
    (instead("state", WEIGHTS), "the weights in run do not fit its config.json: they differ in '"),
    (alter(WEIGHTS, "embedding", nan), "not all finite numbers, see 'embedding.weight': take an o"),
    (alter(WEIGHTS, "log_dt", torch.Tensor.long), "they differ in 'stack.layers.0.layer.diagonal."),
    (cut(CONFIG, 40), f"{DAMAGED}the model configuration is not JSON: "),
    (put(CONFIG, NOISE), f"{DAMAGED}'utf-8' codec can't decode byte 0x80"),
    (put(CONFIG, "[]"), f"{DAMAGED}the model configuration must be a JSON object, got a list"),
    (put(CONFIG, DEEP), f"{DAMAGED}the model configuration is not JSON: maximum recursion depth"),
    (change(CONFIG, "colour", to="red"), f"{DAMAGED}unknown model setting 'colour': Known: "),
    (change(CONFIG, "d_model", to="8"), "wants d_model to be int, got '8'"),
    (change(CONFIG, "d_model", to=16), "do not fit its config.json: they differ in 'embedding.wei"),
    (change(CONFIG, "vocab_size", to=10**30), "vocab_size must be at most 16,777,216, got 1000"),
    (change(CONFIG, "pattern", to="h33"), f"{DAMAGED}unknown layer 'h33': did you mean 'h3'?"),
    (change(CONFIG, "layers", to={"h3": 3}), "wants layers to be a mapping to a mapping to int or"),
    (put("run/tokenizer.json", "{"), "the tokenizer run/tokenizer.json is damaged: Expecting prop"),
    (put("run/tokenizer.json", '{"type": "stateline-character"}'), "it has no characters; build i"),
    (
        put("run/tokenizer.json", json.dumps({"type": "stateline-character", "characters": "aa"})),
        "tokenizer.json is damaged: the characters of a tokenizer must be some and all different",
    ),
    (put("run/tokenizer.json", '{"type": "other"}'), "run/tokenizer.json is no tokenizer: expecte"),
]

STATES = [
    (gone("state"), "no such state file: state"),
    (cut("state", 0), "cannot read state as a state: Error while deserializing header: header too"),
    (cut("state", 200), "cannot read state as a state: Error while deserializing header: invalid"),
    (put("state", NOISE), "cannot read state as a state: Error while deserializing header: header"),
    (instead("run/model.safetensors", "state"), "state is not a state file (wanted format"),
    (instead("other/model.safetensors", WEIGHTS), "state was saved by a model with other weights;"),
    (alter("state", ".past", nan), "state holds NaN in .session.model.layers[0].shift.past: save"),
    (alter("state", ".past", lambda t: t[:, :2]), "state does not fit: its .session.model.layers["),
    (alter("state", "session.token", lambda t: t + 999), "state is damaged: its numbers are not t"),
]

INDEX, SHARD = "corpus/index.json", "corpus/train-00000"
AGAIN = "the command that made it, run again, writes what is missing"
CORPORA = [
    (gone(INDEX), "no corpus in corpus: index.json is missing; make one with stateline data SOURC"),
    (lambda: Path(INDEX).rename("corpus/unfinished.json"), "the corpus corpus is unfinished: the"),
    (cut(INDEX, 100), f"{INDEX} is damaged: Unterminated string starting at: line 4 column"),
    (put(INDEX, DEEP), f"{INDEX} is damaged: maximum recursion depth exceeded"),
    (change(INDEX, "version", to=2), f"{INDEX} must be of the format stateline-corpus, version 1,"),
    (change(INDEX, "splits", to=3), f"{INDEX} is damaged: AttributeError"),
    (change(INDEX, "settings", to={}), f"{INDEX} is damaged: KeyError('newlines'); {AGAIN}"),
    (change(INDEX, "splits", to={}), "must have documents to train on and documents that are held"),
    (gone(f"{SHARD}.bin"), f"{SHARD}.bin must have 2880 bytes, but is missing: {AGAIN}"),
    (cut(f"{SHARD}.bin", 99), f"{SHARD}.bin must have 2880 bytes, but has 99 bytes: {AGAIN}"),
    (cut(f"{SHARD}.json", 30), f"{SHARD}.json is damaged: Unterminated string"),
    (change(f"{SHARD}.json", "tokens", to=[1]), "the corpus corpus is damaged: its sizes differ;"),
    (change(f"{SHARD}.json", "bytes", to=[10**30]), "the corpus corpus is damaged: Python int too"),
    (gone("corpus/tokenizer.json"), "no tokenizer 'corpus/tokenizer.json': No such file or direct"),
    (put("corpus/tokenizer.json", "{"), "the tokenizer corpus/tokenizer.json is damaged: Expectin"),
    (
        put("corpus/tokenizer.json", '{"type": "stateline-character", "characters": "ab"}'),
        "corpus/tokenizer.json is not what made the corpus; the command that made it, run again",
    ),
]

ROWS = [
    ('{"text": "a"}\n{"text": "b"\n', "rows.jsonl, line 2, is not JSON: Expecting ',' delimiter"),
    ('{"text": "a"}\n\n{"body": "b"}\n', "line 3, must have text in the field 'text', but it has"),
    ("[1]\n", "line 1, must have text in the field 'text', but it has no fields: [1]; correct it"),
    ('{"text": 3}\n', "line 1, must have text in the field 'text', but it has 3 there: name anoth"),
    (NOISE, "rows.jsonl, line 1, is not JSON: "),
    (DEEP, "rows.jsonl, line 1, is not JSON: maximum recursion depth exceeded"),
    ("\n\n", "rows.jsonl: give a path to a file or folder of text"),
]

SPLITS = [
    ("{", "the splits splits.json are not JSON: Expecting property name"),
    (NOISE, "the splits splits.json are not JSON: 'utf-8' codec can't decode byte 0x80"),
    (DEEP, "the splits splits.json are not JSON: maximum recursion depth exceeded"),
    ('{"train": "0.txt"}', 'the splits splits.json must be {"train": [NAME, ...], "held_out": [..'),
    ('{"training": ["0.txt"]}', "with at least one name to train on"),
    ('{"train": ["9.txt"]}', "'9.txt' in splits.json names none of the files: correct it or leave"),
    ('{"train": ["0.txt"], "test": ["0.txt"]}', "splits.json has '0.txt' in two splits: leave it"),
]

RESULTS = "run/results.json"
REPORTS = [
    (gone(RESULTS), "no results in run: results.json is missing; give the folder of a comparison"),
    (put(RESULTS, ""), f"{RESULTS} is damaged: Expecting value: line 1 column 1 (char 0); run its"),
    (put(RESULTS, DEEP), f"{RESULTS} is damaged: maximum recursion depth exceeded"),
    (change(RESULTS, "format", to="stateline-results-2"), "must have the format 'stateline-result"),
    (change(RESULTS, "runs", 0, "seed", to="x"), f"{RESULTS} is damaged: seed cannot be 'x'; run"),
    (change(RESULTS, "tasks", to=[]), f"{RESULTS} is damaged: it names no model or no task; run"),
]

PROMPTS = [
    (put("prompts", ""), "prompts must have a prompt in every line, got an empty one"),
    (put("prompts", "to\n\nbe\n"), "prompts must have a prompt in every line, got an empty one"),
    (put("prompts", NOISE), "prompts must have a prompt in every line, got an empty one"),
    (lambda: Path("prompts").mkdir(), "cannot read the prompts in prompts: Is a directory; give a"),
    (lambda: None, "cannot read the prompts in prompts: No such file or directory; give a file of"),
]

RUN = "run/checkpoints/step-00000004"
RECORD, TENSORS = f"{RUN}/training.json", f"{RUN}/training.safetensors"
BROKEN = f"the checkpoint {RUN} is damaged: "
RESUMED = [
    (gone(RECORD), f"{BROKEN}[Errno 2] No such file or directory: "),
    (cut(RECORD, 60), f"{BROKEN}Expecting ',' delimiter: line 1 column 61 (char 60); remove it to"),
    (put(RECORD, NOISE), f"{BROKEN}'utf-8' codec can't decode byte 0x80"),
    (put(RECORD, DEEP), f"{BROKEN}maximum recursion depth exceeded"),
    (change(RECORD, "progress", to={}), f"{BROKEN}its progress is not whole; remove it to go on"),
    (change(RECORD, "progress", "steps", to=99), f"{BROKEN}it is of step 99; remove it to go on"),
    (change(RECORD, "progress", "steps", to="x"), "wants steps to be int, got 'x'; r"),
    (change(RECORD, "train", "lr", to=9), f"{RUN} is of a run with another lr (9 then, 0.004 now)"),
    (put("book.txt", "Another text. " * 99), f"{RUN} is of a run with another data ("),
    (cut(TENSORS, 0), f"{BROKEN}Error while deserializing header: header too small; remove it"),
    (cut(TENSORS, 5000), f"{BROKEN}Error while deserializing header: "),
    (instead("state", TENSORS), f"{BROKEN}'random'; remove it to go on from an older one"),
    (cut(f"{RUN}/model.safetensors", 5000), f"{BROKEN}Error while deserializing header: "),
    (
        instead("numbers/model.safetensors", f"{RUN}/model.safetensors"),
        f"{BROKEN}its weights are those of another model; remove it to go on from an older one",
    ),
    (put("run/metrics.jsonl", "{\n{}\n"), "line 1 of run/metrics.jsonl is no line of metrics: res"),
    (put("run/metrics.jsonl", NOISE + b"\n{}\n"), "of run/metrics.jsonl is no line of metrics: re"),
]

TRAIN_TOKENS = 'train h3 --task "tokens(path=corpus, length=16)" --model.d_model 8 --out new'
TABLES = {
    "train recipe.yaml --out new": RECIPES,
    "generate run --prompt to": MODELS,
    "generate run --state state": STATES,
    TRAIN_TOKENS: CORPORA,
    "data rows.jsonl --out new": [(put("rows.jsonl", text), message) for text, message in ROWS],
    "data source --splits splits.json --out new": [
        (put("splits.json", text), message) for text, message in SPLITS
    ],
    "report run": REPORTS,
    "generate run --prompts prompts": PROMPTS,
    "train recipe.yaml --out run --resume": RESUMED,
}
CASES = [
    (damage, command, message) for command, table in TABLES.items() for damage, message in table
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("damage", "command", "message"), CASES, ids=[f"{case[1]}: {case[2]}" for case in CASES]
)
def test_a_damaged_file_is_one_line_and_nothing_is_harmed(
    refused: Refused, damage: Damage, command: str, message: str
) -> None:
    damage()
    said = "going on from run/checkpoints/step-00000004" if "--resume" in command else ""
    assert message in refused(command, said=said)
