"""Wrong inputs that once crashed, hung or harmed something."""

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.refusals.fuzz import mutate
from tests.refusals.fuzz.cases import COMMANDS, HASHES, READ, RESUME, TOKENS, Case

Damage = Callable[[], object]
HALF = "half/checkpoints/step-00000002"
CARRIED = "carried/checkpoints/step-00000001"
CARRY = "--train.carry_state true --train.steps 2 --train.save_every 1"
WORKS = [*COMMANDS, f"{RESUME} carried {CARRY}"]
"""Commands that are met by damage here or in random cases, and work without it."""

HUGE = (str(2**63), str(2**64))
TRAIN = "train {} --task copying --train.steps 1 --model.d_model 8 --out new"


def put(name: str, text: str) -> Damage:
    """Another text in a file."""
    return lambda: Path(name).write_text(text)


def alter(name: str, part: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Other tensors where their names hold ``part``."""

    def damage() -> None:
        with safe_open(name, framework="pt") as file:
            found = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        assert any(part in key for key in found), sorted(found)
        changed = {key: how(t).contiguous() if part in key else t for key, t in found.items()}
        save_file(changed, name, metadata=metadata)

    return damage


def renamed(name: str, part: str) -> Damage:
    """Tensors with ``part`` in their names, each under the name of the next."""

    def damage() -> None:
        with safe_open(name, framework="pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        keys = sorted(key for key in found if part in key)
        for key, value in zip(keys, [found[key] for key in (*keys[1:], keys[0])], strict=True):
            found[key] = value
        save_file(found, name, metadata=metadata)

    return damage


def fixed() -> Iterator[tuple[str, str, Damage]]:
    """Name, command and damage of each."""
    for name, command, damage in checkpoints():
        yield name, command, damage
        yield f"{name}, without hashes", command, unhashed(damage)
    yield from texts()
    yield from numbers()
    yield from files()
    yield from trees()
    yield from places()


def unhashed(damage: Damage) -> Damage:
    """The damage, and no hashes of the checkpoint that tell of it first."""

    def both() -> None:
        damage()
        for folder in (HALF, CARRIED):
            for name in HASHES:
                Path(folder, name).unlink(missing_ok=True)

    return both


def nothing() -> None:
    """No damage: the command line itself is wrong."""


def checkpoints() -> Iterator[tuple[str, str, Damage]]:
    """Damaged checkpoints that were taken, or corrupted memory."""
    tensors, record = f"{HALF}/training.safetensors", f"{HALF}/training.json"
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "of another shape": lambda t: torch.cat([t.flatten(), t.flatten()]),
        "flat": torch.flatten,
        "of one number": lambda t: t.flatten()[:1],
        "NaN": lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t,
        "of integers": torch.Tensor.long,
    }
    for what, how in changes.items():
        yield f"moments {what}", f"{RESUME} half", alter(tensors, "exp_avg", how)
        yield f"weights {what}", f"{RESUME} half", alter(f"{HALF}/model.safetensors", ".", how)
        if what != "of integers":
            state, resume = f"{CARRIED}/training.safetensors", f"{RESUME} carried {CARRY}"
            yield f"carried state {what}", resume, alter(state, "carried/2", how)
    double = alter(f"{CARRIED}/training.safetensors", "carried", lambda t: torch.cat([t, t]))
    yield "carried state of two batches", f"{RESUME} carried {CARRY}", double
    yield "moments of others", f"{RESUME} half", renamed(tensors, "exp_avg")
    yield (
        "random state of another dtype",
        f"{RESUME} half",
        alter(tensors, "random", torch.Tensor.long),
    )
    for value in ("because", 3, True, ["finished"]):
        name = f"a run that stopped for {value!r}"
        yield name, f"{RESUME} half", mutate.change(record, "progress", "stopped", to=value)


def texts() -> Iterator[tuple[str, str, Damage]]:
    """Patterns and tasks that ask for too much, and what cannot run."""
    patterns = {
        "a billion passes": "staircase(h3, passes=1000000000)",
        "sixty nested ladders": "ladder(" * 60 + "h3" + ")" * 60,
        "ladders of thousands": "ladder(h3*9999)*9999",
        "a layer of other width": "diagonal_ssm(n_outputs=2)",
        "a huge state": "s4d(d_state=1000000000000)",
        "a huge filter": "long_conv(filter_len=1000000000000)",
        "a huge window": "sliding_attention(window=10000000000000000000)",
    }
    for name, pattern in patterns.items():
        yield f"{name}, trained", TRAIN.format(shlex.quote(pattern)), nothing
        yield f"{name}, described", f"info {shlex.quote(pattern)} --d_model 8", nothing
    for setting in ("max_len=1000000000000000", "batch_size=1000000000000", "n_letters=1e15"):
        yield f"copying with {setting}", f"train h3 --task 'copying({setting})' --out new", nothing
    huge = "--model.d_model 16777216 --train.steps 1 --out new"
    yield "a width beyond memory", f"train h3 --task copying {huge}", nothing
    yield "two lines", "info 'h3\nh4'", nothing
    yield "a name of two lines", "generate 'no\nwhere' --prompt x", nothing


def numbers() -> Iterator[tuple[str, str, Damage]]:
    """Numbers beyond every type."""
    for value in ("9" * 5000, *HUGE, "-1", "nan"):
        for command, option in (
            ("generate numbers --prompt 1", "--seed"),
            ("generate numbers --prompt 1", "--max_new_tokens"),
            ("generate numbers --prompt 1", "--top_k"),
            ("evaluate run book.txt", "--window"),
            ("capacity lstm", "--d_model"),
            ("train recipe.yaml --out new", "--train.seed"),
            ("train recipe.yaml --out new", "--train.warmup_steps"),
            ("data source --out new --workers 1", "--shard_tokens"),
        ):
            if option != "--max_new_tokens" or value not in HUGE:  # else a stream without end
                yield f"{option} {value[:30]}", f"{command} {option} {value}", nothing
    yield "a huge length", "capacity copier --batches 1 --length 184467440737095516166", nothing
    penalty = "generate numbers --prompt 1 --repetition_penalty 1e-308"
    yield "a tiny penalty", penalty, nothing


def files() -> Iterator[tuple[str, str, Damage]]:
    """What is no regular file, wherever a file is read."""
    for kind in ("a pipe", "a link to /dev/zero", "a loop of links", "without permission"):
        for name, commands in READ.items():
            damage = partial(mutate.instead, Path(name), kind)
            yield f"{name}: {kind}", commands[0], damage
    for name in ("run/model.safetensors", f"{HALF}/model.safetensors", f"{HALF}/training.json"):
        yield f"{name}: a terabyte", READ[name][0], partial(os.truncate, name, 1 << 40)
    for command in ("convert {} new", "convert run {}"):
        for path in ("x" * 300, "~nobody-of-this-name/x"):
            yield f"{command} {path[:20]}", command.format(path), nothing
    yield "a run is a pipe", "generate pipe --prompt to", lambda: os.mkfifo("pipe")
    for path in ("x" * 300, "~nobody-of-this-name/x", "/dev/zero"):
        for command in ("generate {}", "evaluate run {}", "report {}", "data {} --out new"):
            yield f"{command} {path[:20]}", command.format(path), nothing
        yield f"text {path[:20]}", f"train h3 --task 'text(path={path})' --out new", nothing
        yield f"state {path[:20]}", f"generate run --state {path}", nothing
        yield f"prompts {path[:20]}", f"generate run --prompts {path}", nothing


def trees() -> Iterator[tuple[str, str, Damage]]:
    """JSON and YAML of the right syntax and the wrong types."""
    deep = "[" * 100_000
    for name in (
        "run/results.json",
        "copier/config.json",
        "corpus/index.json",
        f"{HALF}/training.json",
    ):
        for text in ("[]", "3", "null", '"x"', deep, "{}", '{"format": [{}]}'):
            yield f"{name} is {text[:20]}", READ[name][0], put(name, text)
    yield "metrics without a checkpoint", f"{RESUME} half", partial(shutil.rmtree, HALF)
    for text in ("[]", "3", deep):
        yield f"result.json is {text[:20]}", f"{RESUME} run", put("run/result.json", text)
    splits = ("splits", "train", 0)
    train = f"train h3 --task '{TOKENS}' --train.steps 1 --model.d_model 8 --out new"
    index = "corpus/index.json"
    yield "nested shards", train, mutate.change(index, "splits", "train", to=[[["train-00000"]]])
    yield "bytes of a shard 0", train, mutate.change(index, *splits, "bytes", to=0)
    yield "tokens of a shard 1.5", train, mutate.change(index, *splits, "tokens", to=1.5)
    for dtype in ("<f2", "<c8", "O", "i4,i4", "<u1", "V2"):
        yield f"shards of {dtype}", train, mutate.change(index, "dtype", to=dtype)
    yield "a smaller vocabulary", train, mutate.change(index, "vocab_size", to=3)
    shard = "corpus/train-00000.bin"
    yield "tokens outside", train, lambda: Path(shard).write_bytes(b"\xff" * 2880)
    for line in ("task: null", "out: null", "pattern: null", "train: null", "model: null"):
        text = "pattern: h3\ntask: copying\n"
        key = line.partition(":")[0]
        kept = "".join(f"{old}\n" for old in text.splitlines() if not old.startswith(key))
        yield (
            f"a recipe with {line}",
            "train recipe.yaml --train.steps 1",
            put("recipe.yaml", f"{kept}{line}\n"),
        )
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)
    )
    yield "a bomb of anchors", COMMANDS[0], put("recipe.yaml", f"{bomb}pattern: h3\n")
    yield (
        "NUL in a path",
        COMMANDS[0],
        put("recipe.yaml", 'pattern: h3\ntask: "text(path=a\\0b)"\n'),
    )
    numbered = "pattern: h3\ntask: copying\nmodel: {layers: {h3: {1: 3}}}\n"
    yield "an option named 1", COMMANDS[0], put("recipe.yaml", numbered)
    plain = (
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"to": 0}, "unk_token": "?"}}'
    )
    yield "no unknown token", COMMANDS[5], put("run/tokenizer.json", plain)
    for what, how in (
        ("of two rows", lambda t: torch.cat([t, t]) if t.ndim else t),
        ("of no row", lambda t: t[:0] if t.ndim else t),
        ("below 0", lambda t: -t - 5 if not t.is_floating_point() and t.dtype != torch.bool else t),
    ):
        yield f"a kept state {what}", COMMANDS[6], alter("state", "", how)


def places() -> Iterator[tuple[str, str, Damage]]:
    """Places to which results cannot be written."""
    for name in (
        "config.json",
        "config.yaml",
        "result.json",
        "results.json",
        "metrics.jsonl",
    ):
        damage = partial(Path("new", name, "x").mkdir, parents=True)
        yield f"a folder at {name}", COMMANDS[0], damage
    page = partial(Path("new/report.html/x").mkdir, parents=True)
    yield "a folder at report.html", "report run --out new", page
    charts = put("new", "")
    yield "a file at charts", "report run --out other --export new", charts
    shard = partial(Path("new/train-00000.bin").mkdir, parents=True)
    yield "a folder at a shard", COMMANDS[13], shard
    for command in (COMMANDS[0], COMMANDS[13], "report run --out new"):
        yield f"no permission: {command}", command, lambda: Path("new").mkdir(mode=0o500)
        yield f"a long name: {command}", command.replace("new", "x" * 300), nothing


REFUSED = {f"{name}{end}" for name, _, _ in checkpoints() for end in ("", ", without hashes")}
REFUSED |= {"tokens outside", "a smaller vocabulary"}
FIXED = {
    name: Case(name, shlex.split(command), damage, refused=name in REFUSED)
    for name, command, damage in fixed()
}
