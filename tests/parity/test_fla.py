"""Linear attention and the delta rule with a decay per entry, from fla's naive recurrences."""

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.ops.flat import delta_rule, gated_delta_rule, linear_attention
from tests.parity.cases import Case, covers
from tests.parity.models import assert_near

BACKENDS = pytest.mark.parametrize("backend", ["numba", "torch", "reference"])


def assert_same(found: tuple[Tensor, Tensor], v: dict[str, Tensor]) -> None:
    """The outputs and the last state."""
    assert_near(found[0], v["y"])
    assert_near(found[1], v["after"])


def signals(v: dict[str, Tensor], scale: float = 3**-0.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, which fla scales by the root of their three entries, keys, values and decays."""
    return scale * v["q"], v["k"], v["v"], v["log_decay"]


@covers("fla_gla")
@BACKENDS
def test_gated_linear_attention(case: Case, backend: str) -> None:
    v = case.tensors()
    assert_same(linear_attention(*signals(v), v["state"], backend=backend), v)


@covers("fla_dplr")
@BACKENDS
def test_the_generalised_delta_rule(case: Case, backend: str) -> None:
    v = case.tensors()
    assert_same(delta_rule(*signals(v), v["a"], v["b"], v["state"], backend=backend), v)


@covers("fla_kda")
@BACKENDS
def test_kimi_delta_attention(case: Case, backend: str) -> None:
    v = case.tensors()
    q, k, values, log_decay = signals(v)
    written = v["beta"][..., None] * k
    given = (written, values, log_decay, log_decay.exp() * k, -written, v["state"])
    assert_same(delta_rule(q, *given, backend=backend), v)


@covers("fla_delta_product")
@BACKENDS
def test_products_of_two_reflections(case: Case, backend: str) -> None:
    v = case.tensors()
    q, k, values, log_decay = signals(v, scale=1)
    q = F.pad(q[:, :, None], (0, 0, 0, 0, 1, 0)).flatten(1, 2)
    log_decay = F.pad(log_decay[:, :, None], (0, 0, 0, 1)).flatten(1, 2)
    y, after = gated_delta_rule(q, k, values, log_decay, v["beta"], v["state"], backend=backend)
    assert_same((y[:, 1::2], after), v)
