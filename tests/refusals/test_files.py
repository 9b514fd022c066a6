"""Damaged files: the command names the file and the fault in one line, and changes no file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.refusals.fuzz.mutate import change

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


def alter(name: str, tensor: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Replace a tensor in a safetensors file, and keep its metadata."""

    def damage() -> None:
        with safe_open(name, framework="pt") as file:
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        (key,) = [key for key in tensors if tensor in key]
        tensors[key] = how(tensors[key]).contiguous()
        save_file(tensors, name, metadata=metadata)

    return damage


def unhashed(damage: Damage) -> Damage:
    """The damage, and no list of hashes that tells of it first."""

    def both() -> None:
        damage()
        Path("run/hashes.json").unlink()

    return both


def nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan"))


NOISE = bytes(range(256))
DEEP = "[" * 100_000

RECIPE = "the recipe recipe.yaml"
RECIPES = [
    (gone("recipe.yaml"), "recipe.yaml: No such file or directory"),
    (put("recipe.yaml", "pattern: [h3"), f"{RECIPE} is not valid YAML: while parsing a flow"),
    (put("recipe.yaml", NOISE), f"{RECIPE} is damaged: it is not UTF-8 text"),
    (put("recipe.yaml", ""), f"{RECIPE} names no pattern: add a line such as pattern: h3*2"),
    (put("recipe.yaml", "- h3\n- lstm"), f"{RECIPE}: Unexpected config: - h3 - lstm"),
    (
        put("recipe.yaml", "task: copying"),
        f"{RECIPE} names no pattern: add a line such as pattern: h3*2",
    ),
    (put("recipe.yaml", "pattern: h3\ncolour: red"), f"{RECIPE}: unknown option 'colour'"),
    (
        put("recipe.yaml", "train: {stepz: 3}"),
        "unknown option 'train.stepz': did you mean 'train.steps'?",
    ),
    (
        put("recipe.yaml", "train: {steps: many}"),
        f"{RECIPE}: train.steps must be int of at least 1, got",
    ),
    (put("recipe.yaml", "train: 3"), f"train in {RECIPE} must be a mapping, got 3"),
    (put("recipe.yaml", "pattern: [h3]"), f"{RECIPE}: pattern must be str, got"),
    (put("recipe.yaml", "pattern: h3)"), "expected a layer name at <here>: h3<here>)"),
    (
        put("recipe.yaml", "model: {norm: group}"),
        "norm must be one of layer, rms, rms_offset, batch, none, got 'group'",
    ),
    (
        put("recipe.yaml", "{pattern: h3, train: {lr: .nan}}"),
        "wants lr to be a finite number above 0",
    ),
    (put("recipe.yaml", "pattern: !!python/name:os.abort"), "could not determine a constructor"),
    (
        put("recipe.yaml", "{pattern: h3, model: {layers: {h3: {d_stat: 4}}}}"),
        "unknown keyword of H3 'd_stat': did you mean 'd_state'?",
    ),
    (put("recipe.yaml", "{pattern: h3, task: text(path=nowhere)}"), "'nowhere', which does not ex"),
]

CONFIG, WEIGHTS = "run/config.json", "run/model.safetensors"
DAMAGED = "the model in run is damaged: "
CHANGED = "is damaged or was changed: its hash is not that in hashes.json; restore it, or remove"
CONTENTS = [
    (cut(WEIGHTS, 0), f"{DAMAGED}Error while deserializing header: header too small; save or trai"),
    (cut(WEIGHTS, 5000), f"{DAMAGED}Error while deserializing header: "),
    (put(WEIGHTS, NOISE), f"{DAMAGED}Error while deserializing header: header too large"),
    (
        instead("numbers/model.safetensors", WEIGHTS),
        "do not fit its config.json: 'embedding.weight' must have the shape (256, 8), got (10, 8)",
    ),
    (instead("state", WEIGHTS), "the weights in run do not fit its config.json: only one of them"),
    (alter(WEIGHTS, "embedding", nan), "are not all finite, see 'embedding.weight': take an older"),
    (
        alter(WEIGHTS, "log_dt", torch.Tensor.long),
        "log_dt' must be like torch.float32, got torch.int64",
    ),
    (
        alter(WEIGHTS, "embedding", lambda tensor: tensor.to(torch.float8_e4m3fn)),
        "embedding.weight' must be like torch.float32, got torch.float8_e4m3fn",
    ),
    (cut(CONFIG, 40), f"the model configuration {CONFIG} is not JSON: "),
    (put(CONFIG, NOISE), f"the model configuration {CONFIG} is damaged: it is not UTF-8 text"),
    (put(CONFIG, "[]"), f"the model configuration {CONFIG} must be a JSON object, got a list"),
    (put(CONFIG, DEEP), f"the model configuration {CONFIG} is nested too deeply"),
    (
        change(CONFIG, "colour", to="red"),
        f"{CONFIG} is damaged, or of another version of Stateline: unknown keyword",
    ),
    (change(CONFIG, "d_model", to="8"), "wants d_model to be int from 1 to"),
    (
        change(CONFIG, "d_model", to=16),
        "do not fit its config.json: 'embedding.weight' must have the shape",
    ),
    (change(CONFIG, "vocab_size", to=10**30), "wants vocab_size to fit into 64 bits, got a"),
    (
        change(CONFIG, "pattern", to="h33"),
        f"cannot build the model of {CONFIG}: unknown layer 'h33': did you mean",
    ),
    (change(CONFIG, "layers", to={"h3": 3}), "wants layers to be a mapping from str to a mapping"),
]
MODELS = [
    *((unhashed(damage), message) for damage, message in CONTENTS),
    *((damage, CHANGED) for damage, _ in CONTENTS),
    (gone(WEIGHTS), "no model in run: model.safetensors is missing"),
    (
        put("run/tokenizer.json", "{"),
        "the tokenizer run/tokenizer.json is not JSON: Expecting prop",
    ),
    (put("run/tokenizer.json", '{"type": "stateline-character"}'), "it has no characters; build i"),
    (
        put("run/tokenizer.json", json.dumps({"type": "stateline-character", "characters": "aa"})),
        "tokenizer.json is damaged: the characters of a tokenizer must be non-empty and unique",
    ),
    (
        put("run/tokenizer.json", '{"type": "other"}'),
        "run/tokenizer.json is not a tokenizer: expecte",
    ),
]

STATES = [
    (gone("state"), "cannot read the state file state: No such file or directory; give a"),
    (cut("state", 0), "cannot read state as a state: Error while deserializing header: header too"),
    (cut("state", 200), "cannot read state as a state: Error while deserializing header: invalid"),
    (put("state", NOISE), "cannot read state as a state: Error while deserializing header: header"),
    (instead("run/model.safetensors", "state"), "state is not a state file (wanted format"),
    (
        unhashed(instead("other/model.safetensors", WEIGHTS)),
        "state was saved by a model with other weights;",
    ),
    (
        alter("state", ".past", nan),
        "state does not fit: its .session.model.layers[0].shift.past holds NaN; load it with the",
    ),
    (alter("state", ".past", lambda t: t[:, :2]), "state does not fit: its .session.model.layers["),
    (alter("state", "session.token", lambda t: t + 999), "state is damaged: its numbers differ fr"),
]

INDEX, SHARD = "corpus/index.json", "corpus/train-00000"
AGAIN = "repeat the command that made it, which writes what is missing"
CORPORA = [
    (gone(INDEX), "no corpus in corpus: index.json is missing; make one with stateline data SOURC"),
    (lambda: Path(INDEX).rename("corpus/unfinished.json"), "the corpus corpus is unfinished: run"),
    (cut(INDEX, 100), f"{INDEX} is not JSON: Unterminated string starting at: line 4 column"),
    (put(INDEX, DEEP), f"{INDEX} is nested too deeply; repeat"),
    (change(INDEX, "version", to=2), f"{INDEX} must be of the format stateline-corpus, version 1,"),
    (change(INDEX, "splits", to=3), f"{INDEX} is damaged: Expected `object`, got `int`"),
    (change(INDEX, "settings", to={}), "missing required field `newlines`"),
    (change(INDEX, "splits", to={}), "must have documents to train on and documents that are held"),
    (gone(f"{SHARD}.bin"), f"{SHARD}.bin must have 1440 bytes, but is missing: {AGAIN}"),
    (cut(f"{SHARD}.bin", 99), f"{SHARD}.bin must have 1440 bytes, but has 99 bytes: {AGAIN}"),
    (cut(f"{SHARD}.json", 30), f"{SHARD}.json is not JSON: Unterminated string"),
    (change(f"{SHARD}.json", "tokens", to=[1]), f"{SHARD}.json is damaged: "),
    (change(f"{SHARD}.json", "bytes", to=[10**30]), f"{SHARD}.json is damaged: Expected `int`"),
    (gone("corpus/tokenizer.json"), "there is no tokenizer corpus/tokenizer.json: give"),
    (
        put("corpus/tokenizer.json", "{"),
        "the tokenizer corpus/tokenizer.json is not JSON: Expectin",
    ),
    (
        put("corpus/tokenizer.json", '{"type": "stateline-character", "characters": "ab"}'),
        "corpus/tokenizer.json is not what made the corpus; repeat the command that made it",
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
    ("{", "the file of splits splits.json is not JSON: Expecting property name"),
    (NOISE, "the file of splits splits.json is damaged: it is not UTF-8 text"),
    (DEEP, "the file of splits splits.json is nested too deeply"),
    ('{"train": "0.txt"}', 'the splits splits.json must be {"train": [NAME, ...], "held_out": [..'),
    ('{"training": ["0.txt"]}', "with at least one name in"),
    ('{"train": ["9.txt"]}', "'9.txt' in splits.json names none of the files: correct it or leave"),
    ('{"train": ["0.txt"], "test": ["0.txt"]}', "splits.json has '0.txt' in two splits: leave it"),
]

RESULTS = "run/results.json"
REPORTS = [
    (gone(RESULTS), "no results in run: results.json is missing; give the folder of a comparison"),
    (put(RESULTS, ""), f"{RESULTS} is damaged: Expecting value: line 1 column 1 (char 0); run its"),
    (put(RESULTS, DEEP), f"{RESULTS} is damaged: it is nested too deeply"),
    (
        change(RESULTS, "format", to="stateline-results-2"),
        "the format must be 'stateline-results-1'",
    ),
    (
        change(RESULTS, "runs", 0, "seed", to="x"),
        "Expected `int`, got `str` - at `$.runs[0].seed`; run",
    ),
    (
        change(RESULTS, "runs", 0, "curve", 0, "step", to=10**400),
        f"{RESULTS} is damaged: it has an integer of 401 digits; run",
    ),
    (
        change(RESULTS, "tasks", to=[]),
        f"{RESULTS} is damaged: there must be at least one model and",
    ),
]

PROMPTS = [
    (put("prompts", ""), "prompts must have a prompt in every line, got an empty one"),
    (put("prompts", "to\n\nbe\n"), "prompts must have a prompt in every line, got an empty one"),
    (put("prompts", NOISE + b"\n\n"), "prompts must have a prompt in every line, got an empty one"),
    (lambda: Path("prompts").mkdir(), "cannot read the file of prompts prompts: it is a folder"),
    (lambda: None, "cannot read the file of prompts prompts: No such file or directory"),
]

RUN = "run/checkpoints/step-00000004"
RECORD, TENSORS = f"{RUN}/training.json", f"{RUN}/training.safetensors"
BROKEN = f"the checkpoint {RUN} is damaged: "
RESUMED = [
    (gone(RECORD), f"{BROKEN}cannot read the file {RECORD}: No such file or"),
    (cut(RECORD, 60), f"{BROKEN}training.json is not as it was written; remove it to go on"),
    (put(RECORD, NOISE), f"{BROKEN}training.json is not as it was written; remove it to go on"),
    (put(RECORD, DEEP), f"{BROKEN}training.json is not as it was written; remove it to go on"),
    (
        change(RECORD, "progress", to={}),
        f"{BROKEN}training.json is not as it was written; remove it to go on",
    ),
    (
        change(RECORD, "progress", "steps", to=99),
        f"{BROKEN}training.json is not as it was written; remove it to go on",
    ),
    (
        change(RECORD, "progress", "steps", to="x"),
        f"{BROKEN}training.json is not as it was written",
    ),
    (
        change(RECORD, "train", "lr", to=9),
        f"{BROKEN}training.json is not as it was written; remove it to go on",
    ),
    (put("book.txt", "Another text. " * 99), "other settings: data ("),
    (cut(TENSORS, 0), f"{BROKEN}training.safetensors is not as it was written; remove"),
    (cut(TENSORS, 5000), f"{BROKEN}training.safetensors is not as it was written; remove"),
    (instead("state", TENSORS), f"{BROKEN}training.safetensors is not as it was written; remove"),
    (cut(f"{RUN}/model.safetensors", 5000), f"{BROKEN}model.safetensors is not as it was written"),
    (
        instead("numbers/model.safetensors", f"{RUN}/model.safetensors"),
        f"{BROKEN}model.safetensors is not as it was written; remove it to go on from step-0",
    ),
    (
        put("run/metrics.jsonl", "{\n{}\n"),
        "line 1 of run/metrics.jsonl is not a line of metrics: r",
    ),
    (put("run/metrics.jsonl", NOISE), "run/metrics.jsonl is damaged: it is not UTF-8 text"),
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
    said = "continuing from run/checkpoints/step-00000004" if "--resume" in command else ""
    assert message in refused(command, said=said)
