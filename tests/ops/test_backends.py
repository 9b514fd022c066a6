from pathlib import Path

import pytest
import torch

from stateline import ops
from stateline.errors import InputError
from stateline.ops import OPS, fft_conv, use_backend

U, KERNEL = torch.ones(1, 3, 1), torch.ones(1, 2)
INPUTS = {
    "attention": (torch.ones(1, 2, 1, 2),) * 3,
    "diagonal_ssm": (U, *(torch.ones(1, 1, 2),) * 3),
    "dplr_ssm": (U, torch.ones(1), *(torch.ones(1, 1, 2),) * 4),
    "fft_conv": (U, KERNEL),
    "gated_delta_rule": (
        *(torch.ones(1, 2, 1, 1),) * 3,
        *(torch.ones(1, 2, 1),) * 2,
        torch.ones(1, 1, 1, 1),
    ),
    "linear_attention": (*(torch.ones(1, 2, 1, 1),) * 3, torch.ones(1, 1, 1, 1)),
    "local_attention": (torch.ones(1, 2, 1, 2),) * 3,
    "lstm": (U, *(torch.ones(1, 1),) * 2, *(torch.ones(4, 1),) * 2, *(torch.ones(4),) * 2),
    "selective_scan": (U, U, *(torch.ones(1, 1),) * 3, torch.ones(1, 1, 1)),
    "mimo_ssm": (U, torch.ones(1, 2), *(torch.ones(1, 1, 2),) * 2),
    "short_conv": (U, KERNEL),
}
KEYWORDS = {"local_attention": {"window": 2}}


def test_every_folder_is_an_op_and_every_op_has_a_folder() -> None:
    assert ops.__file__ is not None
    folders = {path.parent.name for path in Path(ops.__file__).parent.glob("*/__init__.py")}
    assert folders == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_definition_and_does_not_prefer_it(op: str) -> None:
    first, *others = OPS[op]
    assert first != "reference"
    assert "reference" in others


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_backend_is_refused_and_the_known_ones_are_listed(op: str) -> None:
    with pytest.raises(InputError) as caught:
        getattr(ops, op)(*INPUTS[op], **KEYWORDS.get(op, {}), backend="tritn")
    known = ", ".join(sorted([*OPS[op], "auto"]))
    assert str(caught.value) == f"unknown backend of {op} 'tritn': Known: {known}"


def test_the_nearest_backend_is_offered() -> None:
    with pytest.raises(InputError, match="did you mean 'reference'"):
        fft_conv(U, KERNEL, backend="referense")


def _uses_operator() -> bool:
    """Whether ``fft_conv`` runs as a PyTorch operator, which the definition does not."""
    y = fft_conv(U.clone().requires_grad_(), KERNEL)
    assert y.grad_fn is not None
    return "GeneratedBackwardFor_stateline" in y.grad_fn.name()


def test_use_backend_chooses_inside_its_block_only() -> None:
    before = _uses_operator()
    with use_backend("reference"):
        inside = _uses_operator()
    assert (before, inside, _uses_operator()) == (True, False, True)


def test_use_backend_restores_after_an_error() -> None:
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert _uses_operator()


def test_the_inner_use_backend_counts() -> None:
    with use_backend("reference"):
        with use_backend("torch"):
            assert _uses_operator()
        assert not _uses_operator()


def test_a_backend_asked_for_by_name_beats_use_backend() -> None:
    with use_backend("missing"):
        assert fft_conv(U, KERNEL, backend="reference").flatten().tolist() == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_state_space_models_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    u = torch.randn(2, 9, 3).to(dtype)
    log_a = torch.randn(3, 4, 2) * 0.1 - 0.5
    b, c, state = torch.randn(3, 4, 2), torch.randn(3, 4, 2), torch.randn(2, 3, 4, 2)
    wanted = ops.diagonal_ssm_chunk(u, log_a, b, c, state)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.diagonal_ssm_chunk(u, log_a, b, c, state)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.equal(other)
