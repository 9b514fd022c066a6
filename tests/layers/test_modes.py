"""Every layer in the modes in which models run: each gives what it gives in float64."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stateline.layers import ATTENTION_WRAPPERS, LAYERS, WRAPPERS
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig

WIDTH, LENGTH = 16, 24
EXACT, ROUNDED = 2.0**-13, 2.0**-4
"""Limits of errors, relative to the largest entry: float32, and products of bfloat16 in a chain."""

PATTERNS = {
    **{name: name for name in LAYERS},
    **{name: f"{name}({'attention' if name in ATTENTION_WRAPPERS else 'h3'})" for name in WRAPPERS},
    "value_residual": "value_residual(rwkv7*2)",
}


@contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def matmul_precision(value: str) -> Any:
    return setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value)


def default_dtype(value: torch.dtype) -> Any:
    return setting(torch.get_default_dtype, torch.set_default_dtype, value)


ATEN = torch.ops.aten
FACTORS = {
    **dict.fromkeys((ATEN.mm.default, ATEN.bmm.default, ATEN.mv.default, ATEN.dot.default), (0, 1)),
    **dict.fromkeys((ATEN.addmm.default, ATEN.baddbmm.default, ATEN.addmv.default), (1, 2)),
}
"""Matrix products, and which of their arguments are factors."""


class RoundedProducts(TorchDispatchMode):
    """Rounds factors of products in float32 as TF32 does, to eleven bits, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[list[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(args)
        places = FACTORS.get(func, ())
        if places and given[places[0]].dtype == torch.float32:
            self.factors.append([given[place].clone() for place in places])
            for place in places:
                bits = given[place].contiguous().view(torch.int32)
                given[place] = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
        return func(*given, **(kwargs or {}))


@contextmanager
def tf32() -> Iterator[RoundedProducts]:
    """The flag of CUDA, and what it does there."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with RoundedProducts() as products:
            yield products
    finally:
        torch.set_float32_matmul_precision("highest")  # the flag, too


MODES: dict[str, tuple[Callable[[], Any], float]] = {
    "grad": (torch.enable_grad, EXACT),
    "no_grad": (torch.no_grad, EXACT),
    "inference": (torch.inference_mode, EXACT),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), ROUNDED),
    "high": (lambda: matmul_precision("high"), ROUNDED),
    "medium": (lambda: matmul_precision("medium"), ROUNDED),
    "TF32": (tf32, ROUNDED),
    "default float64": (lambda: default_dtype(torch.float64), EXACT),
    "default float16": (lambda: default_dtype(torch.float16), EXACT),
    "default bfloat16": (lambda: default_dtype(torch.bfloat16), EXACT),
    "default device": (lambda: torch.device("meta"), EXACT),
    "deterministic": (
        lambda: setting(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ),
        EXACT,
    ),
}


@cache
def case(name: str) -> tuple[Any, Tensor, Tensor]:
    """A layer, its input, and its output in float64."""
    torch.manual_seed(0)
    layer = build_stack(ModelConfig(PATTERNS[name], vocab_size=2, d_model=WIDTH)).eval()
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        return layer, x, copy.deepcopy(layer).double()(x.double())


def read(layer: Any, x: Tensor, verb: str) -> Tensor:
    if verb == "forward":
        return layer(x)
    first, state = layer.forward_chunk(x[:, :-2], layer.init_state(len(x), capacity=2))
    third, state = layer.step(x[:, -2], state)
    last = (
        layer.step(x[:, -1], state)[0] if torch.is_grad_enabled() else layer.step_(x[:, -1], state)
    )
    return torch.cat([first, third[:, None], last[:, None]], dim=1)


# PyTorch says once that norms of autocast's products are not fused with weights in float32.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_layer_keeps_its_precision_in_every_mode(name: str, mode: str) -> None:
    layer, x, wanted = case(name)
    context, limit = MODES[mode]
    for verb in ("forward", "steps") if layer.causal else ("forward",):
        with context():
            found = read(copy.deepcopy(layer), x.clone(), verb)
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert error <= limit, (verb, float(error))


def gradients(layer: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    layer = copy.deepcopy(layer)
    layer(x).square().sum().backward()
    given = [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    return torch.cat([(g.double() / (g.abs().max() + 1e-30)).flatten() for g in given])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    "mode",
    ["grad", "high", "medium", "TF32", "default float64", "default bfloat16", "default device"],
)
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_keep_their_precision_in_every_mode(name: str, mode: str) -> None:
    layer, x, _ = case(name)
    context, limit = MODES[mode]
    wanted = gradients(copy.deepcopy(layer).double(), x.double())
    with context():
        found = gradients(layer, x)
    assert (found - wanted).abs().max() <= 2 * limit


@pytest.mark.parametrize("name", PATTERNS)
def test_every_layer_has_its_shapes_without_numbers(name: str) -> None:
    layer, x, wanted = case(name)
    assert copy.deepcopy(layer).to("meta")(x.to("meta")).shape == wanted.shape
