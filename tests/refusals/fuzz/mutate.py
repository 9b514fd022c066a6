"""Random damage to texts, trees, tensors and files; the given generator decides."""

import json
import math
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

NUMBERS = ["0", "-1", "1", "1.5", "2147483648", "9223372036854775807", "9223372036854775808"]
NUMBERS += ["18446744073709551616", "1e-308", "1e308", "1e15", "nan", "inf", "-inf", "9" * 5000]
NUMBERS += ["1_000", "0x10", "", "true", "null", "١٢", "-0", "1e999", "00"]
WORDS = [
    "",
    " ",
    "x",
    "h3",
    "none",
    "null",
    "../x",
    "a\nb",
    "a\tb",
    "é" * 300,
    "x" * 300,
    "x" * 70000,
]
WORDS += ["~nobody-of-this-name/x", "--help", "-", "*", "[", "{", ")", "((", "\u2028", "=", ","]
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
VALUES: list[Any] = [None, True, False, -1, 0, 1, 3, 1.5, 2**31, 2**63, 2**64, 10**30, -(10**30)]
VALUES += [1e308, 1e-308, math.nan, math.inf, "", "x", "\0", "a\nb", "x" * 5000, "9" * 5000]
VALUES += [[], {}, [[]], [{}], {"": None}, {"1": {"3": 3}}, [1, "2"], [None], DEEP, ["x"] * 2000]


def text(rng: Random, given: str) -> str:
    """The text with one to three small changes."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        given = rng.choice(_TEXT)(rng, given)
    return given


def _number(rng: Random, given: str) -> str:
    """Another number in place of one."""
    found = list(re.finditer(r"\d+(\.\d+)?", given))
    if not found:
        return given + rng.choice(NUMBERS)
    place = rng.choice(found)
    return given[: place.start()] + rng.choice(NUMBERS) + given[place.end() :]


def _insert(rng: Random, given: str) -> str:
    at = rng.randint(0, len(given))
    return given[:at] + rng.choice([*WORDS, *"()*,=:[]{}'\"#&!|>%@`\\"]) + given[at:]


def _cut(rng: Random, given: str) -> str:
    start, end = sorted(rng.randint(0, len(given)) for _ in range(2))
    return given[:start] + given[end:]


def _repeat(rng: Random, given: str) -> str:
    start, end = sorted(rng.randint(0, len(given)) for _ in range(2))
    return given[:end] + given[start:end] * rng.choice([1, 1, 50]) + given[end:]


def _flip(rng: Random, given: str) -> str:
    if not given:
        return "\x01"
    at = rng.randrange(len(given))
    return given[:at] + chr(ord(given[at]) ^ (1 << rng.randrange(7))) + given[at + 1 :]


_TEXT = [_number, _number, _insert, _cut, _repeat, _flip]


def tree(rng: Random, given: Any) -> Any:
    """The tree of lists and dictionaries with a change at one place."""
    given = json.loads(json.dumps(given))
    places = list(_places(given))
    if not places or rng.random() < 0.05:
        return rng.choice(VALUES)
    parent, key = rng.choice(places)
    change = rng.randrange(6)
    if change == 0:
        del parent[key]
    elif change == 1 and isinstance(parent, dict):
        parent[rng.choice(["x", "", "1", "steps", "format"])] = rng.choice(VALUES)
    elif change == 2 and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    elif change == 3:
        other, name = rng.choice(places)
        parent[key] = json.loads(json.dumps(other[name])) if other is not parent[key] else None
    else:
        parent[key] = rng.choice(VALUES)
    return given


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def json_file(rng: Random, path: Path) -> str:
    """Change a file of JSON, or one line of a file of lines."""
    lines = [path.read_text()] if path.suffix != ".jsonl" else path.read_text().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(tree(rng, json.loads(lines[at])))
    path.write_text("\n".join(lines) + "\n")
    return "another tree"


def tensors(rng: Random, path: Path) -> str:
    """Change one tensor of a file, and keep its metadata."""
    with safe_open(path, framework="pt") as file:
        found = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    name = rng.choice(sorted(found))
    how = rng.choice(sorted(_TENSORS))
    if how in ("missing", "renamed"):
        tensor = found.pop(name)
        if how == "renamed":
            found[f"{name}x"] = tensor
    elif how == "swapped":
        other = rng.choice(sorted(found))
        found[name], found[other] = found[other].clone(), found[name].clone()
    else:
        found[name] = _TENSORS[how](found[name]).contiguous()
    save_file(found, path, metadata=metadata)
    return f"{name} {how}"


def _filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: torch.full_like(t, value if t.is_floating_point() else 77)


_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "missing": torch.clone,
    "renamed": torch.clone,
    "swapped": torch.clone,
    "flat": torch.flatten,
    "larger": lambda t: torch.cat([t.flatten(), t.flatten(), t.flatten()]),
    "empty": lambda t: t.flatten()[:0],
    "two rows": lambda t: torch.stack([t, t]),
    "doubled": lambda t: torch.cat([t, t]) if t.ndim else t,
    "transposed": lambda t: t.transpose(0, -1) if t.ndim else t[None],
    "float64": torch.Tensor.double,
    "float16": torch.Tensor.half,
    "integers": torch.Tensor.long,
    "bytes": lambda t: t.to(torch.uint8),
    "nan": _filled(math.nan),
    "infinite": _filled(math.inf),
    "huge": _filled(3e38),
    "negative": lambda t: -t.abs() - 1 if t.dtype != torch.bool else t,
}


def data(rng: Random, path: Path) -> str:
    """Change the bytes of a file."""
    given = bytearray(path.read_bytes())
    how = rng.choice(["flipped", "cut", "empty", "doubled", "noise", "begins anew", "zeros"])
    if how == "flipped":
        for _ in range(rng.choice([1, 1, 5, 50])):
            if given:
                given[rng.randrange(len(given))] ^= 1 << rng.randrange(8)
    elif how == "begins anew":
        given[:8] = rng.randbytes(8)
    else:
        changed = {"cut": given[: rng.randint(0, len(given))], "empty": b"", "doubled": given * 2}
        changed |= {"noise": rng.randbytes(len(given)), "zeros": bytes(len(given))}
        given = bytearray(changed[how])
    path.write_bytes(given)
    return how


def text_file(rng: Random, path: Path) -> str:
    """Change a text."""
    path.write_text(text(rng, path.read_text()), errors="surrogatepass")
    return "another text"


def instead(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    _INSTEAD[kind](path)


def _listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        handle = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{handle}/{path.name}")  # the path itself may be too long
        os.close(handle)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _secret(path: Path) -> None:
    path.touch()
    path.chmod(0)


_INSTEAD: dict[str, Callable[[Path], object]] = {
    "gone": lambda _: None,
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _listen,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a loop of links": lambda path: path.symlink_to(path.name),
    "a broken link": lambda path: path.symlink_to("nowhere"),
    "a terabyte": _sparse,
    "without permission": _secret,
}
INSTEAD = sorted(_INSTEAD)


def change(name: str, *keys: str | int, to: Any) -> Callable[[], None]:
    """Another value at one place of a file of JSON."""

    def damage() -> None:
        record = inner = json.loads(Path(name).read_text())
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to
        Path(name).write_text(json.dumps(record))

    return damage
