"""Wrong calls of every public op, each in a process of its own.

Run it: python -m tests.ops.wrong_calls --count 2000 --seed 0

A call is made from the declaration of a function: tensors of the declared shapes, of which one is
then spoilt in shape, dtype, device or layout, or emptied. The call must raise an ``InputError``, or
give what the definition gives. A crash, another error, or another value is printed, and the exit
code is 1.
"""

import argparse
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from stateline import ops
from stateline.errors import InputError
from stateline.ops import declared

SIZES = {
    "batch": (2,), "length": 5, "slot": 7, "channel": 4, "output": 8, "mode": 3, "taps": 4,
    "past": 3, "d_model": 4, "d_head": 2, "head": 4, "kv_head": 2, "group": 2, "d_key": 3,
    "d_value": 5, "d_state": 3, "d_in": 3, "d_out": 4, "d_hidden": 2, "gates": 8, "gate": 4,
    "hidden": 6,
    "pair": 1, "entry": (3,), "copies": 2, "filter": 2, "window": 3,
    "joint": 6,
}  # fmt: skip
PLAIN = {
    "stride": 2,
    "rule": "zoh",
    "size": 3,
    "block_len": 2,
    "dropout": 0.0,
    "soft_cap": 2.0,
    "eps": 1e-5,
}
OWN = {
    "fft_conv": {"output": 8},
    "h3_core": {"channel": 2, "output": 4},
    "h3_core_step": {"channel": 2, "output": 4},
    "int8_linear": {"group": 1},
}
ABSENT = {"attention_step_": ("start", "first")}
"""Fields of a mask that a function refuses."""

FUNCTIONS = [name for name in ops.__all__ if hasattr(getattr(ops, name), "declared")]
STEPPERS = [name for name in FUNCTIONS if name.endswith("_stepper")]


def valid_inputs(name: str) -> dict[str, Any]:
    """Arguments of a call that fits the declaration of a function."""
    own = getattr(ops, name).declared
    sizes = SIZES | OWN.get(name.removesuffix("per"), {}) | OWN.get(name, {})

    def value(key: str, annotation: Any) -> Any:
        kind = declared.tuple_of(annotation)
        if kind is not None:
            return kind(*(value(field, part) for field, part in own.fields(kind).items()))
        if key in ABSENT.get(name, ()):
            return None
        shape = declared.declared(annotation)
        if shape is None:
            return PLAIN[key]
        return tensor(shape, sizes).abs() if key == "dt" else tensor(shape, sizes)

    parameters = own.signature.parameters.items()
    return {k: value(k, p.annotation) for k, p in parameters}


def tensor(shape: declared.Shape, sizes: dict[str, Any]) -> Tensor:
    axes: list[int] = []
    for axis in shape.text.split():
        size = int(axis) if axis.isdigit() else sizes[axis.lstrip("*#")]
        axes += size if axis.startswith("*") else [size if isinstance(size, int) else size[0]]
    if shape.dtypes is declared.FLOATS:
        return -torch.rand(axes) - 0.1
    return torch.ones(axes, dtype=shape.dtypes[0])


def spoilt(x: Tensor, draw: random.Random) -> tuple[str, Any]:
    """A way in which the tensor is wrong, and the wrong tensor."""
    axis = draw.randrange(x.ndim) if x.ndim else 0
    ways: dict[str, Callable[[], Any]] = {
        "an axis less": lambda: x.select(axis, 0) if x.ndim else x[None],
        "an axis more": lambda: x.unsqueeze(axis),
        "longer": lambda: torch.cat([x, x.narrow(axis, 0, 1)], dim=axis),
        "shorter": lambda: x.narrow(axis, 0, x.shape[axis] - 1),
        "empty": lambda: x.narrow(axis, 0, 0),
        "of one": lambda: x.narrow(axis, 0, 1),
        "much longer": lambda: x.repeat_interleave(1000, dim=axis),
        "other dtype": lambda: x.to(
            draw.choice([torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
        ),
        "other precision": lambda: x.to(
            draw.choice([torch.float64, torch.bfloat16, torch.float16])
        ),
        "other device": lambda: x.to("meta"),
        "strided": lambda: x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(2)[::2],
        "one number": lambda: x.flatten()[:1].as_strided(x.shape, [0] * x.ndim),
        "transposed": lambda: x.transpose(0, -1),
        "nothing": lambda: None,
        "a list": lambda: x.tolist(),
    }
    way = draw.choice(list(ways)) if x.ndim else "an axis more"
    return f"{way}, axis {axis}", ways[way]()


def wrong_call(name: str, draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Description and arguments of a call in which one tensor is spoilt."""
    values, structure = tree_flatten(valid_inputs(name))
    place = draw.choice([i for i, x in enumerate(values) if isinstance(x, Tensor)])
    way, values[place] = spoilt(values[place], draw)
    return f"{name}, tensor {place}: {way}", tree_unflatten(values, structure)


def outcome(name: str, inputs: dict[str, Any], backend: str) -> list[Tensor]:
    """All results of a call, and the states that it changed."""
    inputs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs)
    found = getattr(ops, name)(**inputs, backend=backend)
    if name in STEPPERS:
        torch.manual_seed(0)
        token = valid_inputs(name.removesuffix("per"))
        signals = [v for k, v in token.items() if k not in ("weights", "kernel")]
        if backend == "reference":
            signals = tree_map(lambda x: x.double(), signals)
        found = found(*signals), signals[-1]
    changed = inputs.get("state", inputs.get("cache")) if name.endswith("_") else None
    return [x for x in tree_flatten((found, changed))[0] if isinstance(x, Tensor)]


def judge(name: str, inputs: dict[str, Any], backend: str = "auto") -> str:
    """What is wrong with the answer to a call, or an empty string."""
    try:
        found = outcome(name, inputs, backend)
    except InputError as error:
        return "" if "\n" not in str(error) else "an error of several lines"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    floats = [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor) and x.is_floating_point()]
    signals = [torch.float32] if name in STEPPERS else []  # of their tokens
    coarse = max((torch.finfo(d).eps for d in [*signals, *(x.dtype for x in floats)]), default=0.0)
    wanted = outcome(name, tree_map(wide, inputs), "reference")
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} for {tuple(b.shape)}"
        size = max(1.0, b.nan_to_num().abs().max().item()) if b.numel() else 1.0
        bound = coarse**0.5 * size  # NaN is right where a query attends to nothing
        if not torch.allclose(a.double(), b.double(), rtol=0.0, atol=bound, equal_nan=True):
            return "another value than the definition's"
    return ""


def judged_apart(name: str, inputs: dict[str, Any], backend: str) -> str:
    """The judgement of a process of its own, or how it died."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(writer, judge(name, inputs, backend).encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    return f"died: status {status}" if status else said


def failures(count: int, seed: int) -> Iterator[str]:
    """Descriptions of the calls that did not end as they must."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in FUNCTIONS:  # kernels are compiled once, not in every child
        torch.manual_seed(0)
        if wrong := judge(name, valid_inputs(name)):
            yield f"{name}, a valid call: {wrong}"
    for index in range(count):
        draw = random.Random(f"{seed}-{index}")
        torch.manual_seed(index)
        name = FUNCTIONS[index % len(FUNCTIONS)]
        what, inputs = wrong_call(name, draw)
        backend = draw.choice(("auto", "auto", "torch", "reference"))
        if said := judged_apart(name, inputs, backend):
            yield f"{index}: {what}, {backend}: {said}"


def main() -> int:
    """Print every failure; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kinds: Counter[str] = Counter()
    for failure in failures(given.count, given.seed):
        print(failure, flush=True)
        kinds[failure.rsplit(": ", 1)[-1][:60]] += 1
    print(f"{sum(kinds.values())} of {given.count} calls did not end as they must")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
