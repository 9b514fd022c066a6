"""Wrong and odd calls of all public ops."""

import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from stateline import ops
from stateline.errors import InputError
from tests.ops.wrong_calls import FUNCTIONS, STEPPERS, valid_inputs

CHANGED = ("state", "cache")
"""Arguments that steps in place change."""


@pytest.mark.slow
def test_a_wrong_call_is_refused_or_answered_rightly() -> None:
    command = [sys.executable, "-m", "tests.ops.wrong_calls", "--count", "400", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(params=FUNCTIONS)
def name(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    return request.param


def run(name: str, inputs: dict[str, Any], **more: Any) -> Any:
    return getattr(ops, name)(**{**inputs, **more})


def negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x) if x.is_floating_point() else x


def test_tensors_that_are_negated_lazily_are_read_with_their_sign(name: str) -> None:
    inputs = valid_inputs(name)
    odd = tree_map_only(Tensor, negated, inputs)
    if name.endswith("_"):
        with pytest.raises(InputError, match=r"negated lazily: give state\.resolve_neg"):
            run(name, odd)
        odd |= {key: deepcopy(x) for key, x in inputs.items() if key in CHANGED}
    if name not in STEPPERS:
        assert_close(run(name, odd), run(name, inputs), rtol=0, atol=0, equal_nan=True)


@pytest.mark.cpu
def test_a_tensor_whose_memory_was_freed_is_refused(name: str) -> None:
    run(name, valid_inputs(name))
    for i, x in enumerate(tree_flatten(valid_inputs(name))[0]):
        if isinstance(x, Tensor):
            inputs = valid_inputs(name)
            tree_flatten(inputs)[0][i].untyped_storage().resize_(0)
            with pytest.raises(InputError, match="whose storage has been freed"):
                run(name, inputs)


def test_a_sparse_tensor_is_refused(name: str) -> None:
    values, structure = tree_flatten(valid_inputs(name))
    for i, x in enumerate(values):
        if isinstance(x, Tensor):
            odd = [*values[:i], x.to_sparse(), *values[i + 1 :]]
            with pytest.raises(InputError, match="as a dense tensor"):
                run(name, tree_unflatten(odd, structure))


@pytest.mark.usefixtures("unannotated")
def test_a_plain_value_of_another_kind_or_range_is_refused(name: str) -> None:
    inputs = valid_inputs(name)
    wrong = {
        "backend": [["numba"], None, 3],
        "dropout": [-1.0, 1, 2, float("nan"), "0", None],
        "stride": [1.5, 2.0, True, 0, "2"],
        "rule": ["zo", ["zoh"], None],
        "window": [ops.LocalWindow(size) for size in (float("nan"), 0, True, 2.0, None)],
    }
    run(name, inputs)  # what is known must not hide what is equal to it, as True is to 1
    for key in wrong.keys() & {*inputs, "backend"}:
        for value in wrong[key]:
            with pytest.raises(InputError, match=rf"\b({key}|rule)\b"):
                run(name, inputs, **{key: value})


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_transforms_have_a_result_or_a_refusal(name: str, backend: str) -> None:
    inputs = valid_inputs(name)
    first = next((key for key, x in inputs.items() if isinstance(x, Tensor)), "")

    def attempt(**more: Any) -> None:
        try:
            run(name, inputs, backend=backend, **more)
        except InputError as error:
            assert str(error).startswith(("the kernels of", "backend"))  # noqa: PT017

    def moved(x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point()

    with forward_ad.dual_level():
        signals = {k: x for k, x in inputs.items() if moved(x) and k not in CHANGED}
        attempt(**{k: forward_ad.make_dual(x, x) for k, x in signals.items()})
    if first and name not in STEPPERS:
        rows = torch.stack([inputs[first]] * 2)
        torch.vmap(lambda x: attempt(**{first: x}) or x, randomness="same")(rows)
