"""Wrong inputs: a damage to the prepared folder, and the command that is run on it."""

import random
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from random import Random

import yaml

from stateline.layers import LAYERS, WRAPPERS
from stateline.tasks import TASKS
from tests.prepared import COPYING
from tests.refusals.fuzz import mutate

TOKENS = "tokens(path=corpus, length=16)"
RESUME = "train recipe.yaml --resume --out"
BRIEFLY = "--lengths 9 --examples 2 --out new"
COMMANDS = [
    "train recipe.yaml --out new",
    "train recipe.yaml --dry_run",
    f"train h3 --task '{COPYING}' --train.steps 2 --model.d_model 8 --out new",
    f"train h3 --task '{TOKENS}' --train.steps 2 --model.d_model 8 --out new",
    f"{RESUME} half",
    "generate run --prompt to --max_new_tokens 3 --seed 3",
    "generate run --state state --max_new_tokens 3",
    "generate run --prompts prompts --max_new_tokens 3",
    "generate numbers --prompt '1 2' --max_new_tokens 3 --top_k 2 --top_p 0.9 --temperature 1.5",
    "generate numbers --prompt '1 2' --max_new_tokens 3 --repetition_penalty 1.2 --log_probs",
    "generate run --prompt to --max_new_tokens 2 --save_state new",
    "evaluate run book.txt --window 32 --stride 8",
    "evaluate run book.txt --chunk 64 --out new.json",
    "data source --out new --workers 1 --tokenizer character --shard_tokens 300 --held_out 0.3",
    "data source --splits splits.json --out new --workers 1",
    "data rows.jsonl --text_key text --out new --workers 1",
    "report run --out new",
    "report run copier --out new",
    "info 'attention h3*2' --d_model 16 --vocab_size 50 --norm rms",
    "capacity lstm --d_model 8 --n_letters 5",
    "capacity copier --batches 1 --length 2",
    "check s4d --d_model 4",
    f"compare h3 lstm --tasks '{COPYING}' --d_model 8 --steps 1 --workers 0 --protocol quick "
    "--out new",
    "convert run new",
    "bench layers --patterns h3 --d_model 8 --lengths 8 --seconds 0.01 --backends torch --force",
    f"probe run --tasks letters copy --data material {BRIEFLY}",
    f"probe hf:exported --tasks letters {BRIEFLY}",
    "export run new",
    "reproduce table.yaml --recipes . --from run --as_is --seeds 0 --out new",
]
"""Commands that work as they stand: mutations begin here."""

READ: Mapping[str, tuple[str, ...]] = {
    "recipe.yaml": (COMMANDS[0],),
    "run/config.yaml": ("train run/config.yaml --out new",),
    "book.txt": (COMMANDS[0], "evaluate run book.txt"),
    "run/config.json": (COMMANDS[5], "evaluate run book.txt", "convert run new", COMMANDS[27]),
    "run/model.safetensors": (COMMANDS[5], "evaluate run book.txt", "convert run new"),
    "run/tokenizer.json": (COMMANDS[5], "evaluate run book.txt"),
    "run/result.json": ("report run --out new", f"{RESUME} run", "export run new"),
    "run/results.json": ("report run --out new", "report run copier --out new"),
    "copier/result.json": (COMMANDS[20],),
    "copier/config.json": (COMMANDS[20],),
    "copier/model.safetensors": (COMMANDS[20],),
    "half/metrics.jsonl": (f"{RESUME} half",),
    "half/config.yaml": (f"{RESUME} half",),
    "half/checkpoints/step-00000002/config.json": (f"{RESUME} half", "generate half --prompt to"),
    "half/checkpoints/step-00000002/model.safetensors": (f"{RESUME} half",),
    "half/checkpoints/step-00000002/training.json": (f"{RESUME} half",),
    "half/checkpoints/step-00000002/training.safetensors": (f"{RESUME} half",),
    "state": (COMMANDS[6],),
    "prompts": (COMMANDS[7],),
    "corpus/index.json": (COMMANDS[3], "data source --out corpus --tokenizer character"),
    "corpus/tokenizer.json": (COMMANDS[3],),
    "corpus/train-00000.json": (COMMANDS[3],),
    "corpus/train-00000.bin": (COMMANDS[3],),
    "rows.jsonl": (COMMANDS[15],),
    "splits.json": (COMMANDS[14],),
    "source/2.txt": (COMMANDS[14],),
    "material/text/lines.jsonl": (COMMANDS[25],),
    "table.yaml": (COMMANDS[28],),
    "exported/config.json": (COMMANDS[26], "export exported new"),
    "exported/model.safetensors": (COMMANDS[26],),
    "exported/generation_config.json": (COMMANDS[26],),
    "exported/tokenizer.json": (COMMANDS[26],),
    "exported/tokenizer_config.json": (COMMANDS[26],),
}
"""Every file that is read, with commands that read it."""

HASHES = ("hashes.json", "manifest.json")

PATHS = [
    "x" * 300,
    "a/" * 3000,
    "~nobody-of-this-name/x",
    "/dev/zero",
    "/dev/null",
    "/proc/self/mem",
]
PATHS += [
    "/dev/null/x",
    "/proc/nowhere",
    "pipe",
    "loop",
    "broken",
    "secret",
    "empty",
    "file",
    "noise",
]
PATHS += ["", ".", "run", "corpus", "state", "a\nb", "x\u2028y", "book.txt", "secret/x", "file/x"]
"""Places that cannot be read or written, or that hold something else."""

ENDLESS = {"--max_new_tokens", "--train.steps", "--batches", "--examples"}
"""Options whose large values ask for long work, and get it."""

BRIEF = ["--train.steps", "4", "--train.accumulate", "1"]
"""For recipes whose numbers may be changed: no long work."""

IN_THE_WAY = ["new", "new/config.yaml", "new/config.json", "new/result.json", "new/results.json"]
IN_THE_WAY += [
    "new/report.html",
    "new/metrics.jsonl",
    "new/checkpoints",
    "new/index.json",
]
IN_THE_WAY += ["new/probes.json", "new/probes.html"]
IN_THE_WAY += ["new/model.safetensors", "new/train-00000.bin", "new/unfinished.json", "new.json"]


@dataclass(frozen=True)
class Case:
    """One wrong input.

    Attributes:
        title: What is wrong with it.
        arguments: Of the command line.
        damage: Called in a fresh copy of the prepared folder before the command runs.
        refused: Whether the command must refuse it; otherwise it may also work.
    """

    title: str
    arguments: list[str]
    damage: Callable[[], object] = field(default=lambda: None, repr=False)
    refused: bool = False

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return " ".join(map(shlex.quote, self.arguments))


def case(seed: int, number: int) -> Case:
    """The case of a number; the same on every machine."""
    rng = random.Random(f"{seed}/{number}")
    kinds = [options, options, paths, pattern, task, recipe, file, file, file, place, in_the_way]
    return kinds[number % len(kinds)](rng)


def options(rng: Random) -> Case:
    """A command with a changed, missing, doubled or unknown argument."""
    name, *arguments = shlex.split(rng.choice(COMMANDS))
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(arguments))
        change = rng.randrange(6)
        if change == 0:
            del arguments[at]
        elif change == 1:
            arguments.insert(at, rng.choice([arguments[at], "--x", "--out", "--", *mutate.WORDS]))
        elif arguments[at].startswith("--") and change < 4:
            many = mutate.NUMBERS if arguments[at] not in ENDLESS else ["-1", "1.5", "x", "nan"]
            arguments[min(at + 1, len(arguments) - 1)] = rng.choice(many)
        else:
            arguments[at] = mutate.text(rng, arguments[at])
        if not arguments:
            break
    for at, argument in enumerate(arguments[1:], 1):
        if arguments[at - 1] in ENDLESS and sum(map(str.isdigit, argument)) > 2:
            arguments[at] = "-2"
    return Case("other options", [name, *(safe(argument) for argument in arguments)])


def safe(argument: str) -> str:
    """An argument that names no place outside the folder."""
    return argument.replace("..", "x").replace("~/", "x").lstrip("/").replace("\0", "")


def paths(rng: Random) -> Case:
    """A command with another path where it wants one."""
    known = {*READ, "new", "new.json", "run", "half", "corpus", "source", "copier", "numbers"}
    known |= {"material", "hf:exported"}
    words = shlex.split(rng.choice(COMMANDS))
    places = [at for at, word in enumerate(words) if word in known or "path=" in word]
    if not places:
        return options(rng)
    at, path = rng.choice(places), rng.choice(PATHS)
    words[at] = words[at].replace("corpus", path) if "path=" in words[at] else path
    return Case(f"a path {path[:20]!r}", words, _hostile)


def _hostile() -> None:
    """Put there what ``PATHS`` names."""
    for name, kind in (
        ("pipe", "a pipe"),
        ("loop", "a loop of links"),
        ("broken", "a broken link"),
    ):
        mutate.instead(Path(name), kind)
    Path("secret").mkdir(mode=0)


def pattern(rng: Random) -> Case:
    """A pattern of layers with odd options, nested and repeated, perhaps misspelt."""
    text = _layers(rng, 0)
    if rng.random() < 0.3:
        text = mutate.text(rng, text)
    size = rng.choice(["1", "3", "6", "8", "8", "8"])
    training = [*shlex.split(f"--task '{COPYING}' --train.steps 1 --out new --model.d_model"), size]
    ways = [
        ["info", text, "--d_model", size],
        ["train", text, *training],
        ["train", text, *training],
    ]
    return Case("another pattern", rng.choice(ways))


def _layers(rng: Random, depth: int) -> str:
    units = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        wraps = depth < 4 and rng.random() < 0.4
        name, kind = rng.choice([*(WRAPPERS if wraps else LAYERS).items()])
        inside = [_layers(rng, depth + 1)] if wraps else []
        inside += _keywords(rng, kind)
        unit = f"{name}({', '.join(inside)})" if inside else name
        times = rng.choice(["", "", "", "*2", "*0", "*9999"])
        units.append(unit + times)
    return " ".join(units)


def _keywords(rng: Random, kind: type) -> list[str]:
    names = [
        p.name for p in signature(kind).parameters.values() if p.kind == Parameter.KEYWORD_ONLY
    ]
    chosen = rng.sample(names, min(len(names), rng.choice([0, 0, 1, 1, 2])))
    values = ["0", "1", "2", "3", "-1", "1000000000", "1.5", "none", "true", "x", "1e308", "9" * 30]
    return [f"{name}={rng.choice(values)}" for name in chosen]


def task(rng: Random) -> Case:
    """A synthetic task with odd options."""
    name, kind = rng.choice(
        [(n, k) for n, k in TASKS.items() if "path" not in signature(k).parameters]
    )
    text = f"{name}({', '.join(_keywords(rng, kind))})"
    if rng.random() < 0.2:
        text = mutate.text(rng, text)
    training = ["--train.steps", "1", "--model.d_model", "8", "--out", "new"]
    return Case("another task", ["train", "lstm", "--task", text, *training])


def recipe(rng: Random) -> Case:
    """A recipe whose tree or text is changed."""
    which = rng.choice(["recipe.yaml", "run/config.yaml"])
    trees = rng.random() < 0.6

    def damage() -> None:
        path = Path(which)
        if trees:
            changed = mutate.tree(rng, yaml.safe_load(path.read_text()))
            path.write_text(yaml.safe_dump(changed, allow_unicode=True), errors="replace")
        else:
            mutate.text_file(rng, path)

    return Case(f"another {which}", ["train", which, *BRIEF, "--out", "new"], damage)


def file(rng: Random) -> Case:
    """A file with other contents."""
    name = rng.choice(sorted(READ))
    how = [mutate.data]
    how += [mutate.json_file] * 3 if name.endswith(("json", "jsonl")) else []
    tensors = name == "state" or name.endswith("safetensors")
    how += [mutate.tensors] * 4 if tensors else []
    how += [mutate.text_file] * 2 if name.endswith(("txt", "yaml", "json", "prompts")) else []
    change, command = rng.choice(how), shlex.split(rng.choice(READ[name]))
    brief = BRIEF if name.endswith(".yaml") and not {"--resume", "--as_is"} & {*command} else []
    title, hashed = f"{name}: {change.__name__}", rng.random() < 0.3

    def damage() -> None:
        change(rng, Path(name))
        for hashes in () if hashed else HASHES:  # which would tell of the damage first
            Path(name).with_name(hashes).unlink(missing_ok=True)

    return Case(title, [*command, *brief], damage)


def place(rng: Random) -> Case:
    """Replace a file that is read by something that is not a regular file."""
    name, kind = rng.choice(sorted(READ)), rng.choice(mutate.INSTEAD)
    command = shlex.split(rng.choice(READ[name]))
    return Case(f"{name}: {kind}", command, lambda: mutate.instead(Path(name), kind))


def in_the_way(rng: Random) -> Case:
    """Put something where the command writes a result."""
    command = shlex.split(rng.choice([c for c in COMMANDS if " new" in c]))
    name, kind = rng.choice(IN_THE_WAY), rng.choice(mutate.INSTEAD)

    def damage() -> None:
        Path(name).parent.mkdir(exist_ok=True)
        mutate.instead(Path(name), kind)

    return Case(f"{name} is {kind}", command, damage)
