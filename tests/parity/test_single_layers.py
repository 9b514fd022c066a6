"""Official layers alone, read and written back."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.models.convert.single_layers import LAYERS, read_layer, write_layer
from tests.parity.cases import Case, covers

pytestmark = pytest.mark.cpu  # what is tested are files

KINDS = {
    "block_recurrent_layer": "block_recurrent",
    "dss_kernel": "dss",
    "gss_block": "gss",
    "h3_layer": "h3_fused h3_pytorch",
    "hyena_implicit_filter": "implicit_filters",
    "s4_fftconv_layer": "s4 diagonal_ssm",
    "s4_nplr_kernel": "s4",
    "s4d_kernel": "diagonal_ssm",
    "s4d_layer": "s4d",
    "s5_apply": "s5",
    "sliding_window_txl_layer": "block_recurrent",
}
"""Our names of the layers in each kind of vectors."""


def layers(case: Case) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Layers of a case, with official tensors; a kernel gets a skip connection."""
    parameters = (
        (name.removeprefix("param."), t)
        for name, t in case.tensors().items()
        if name.startswith("param.")
    )
    prefix = "kernel." if case.kind == "s4_fftconv_layer" else ""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in parameters}
    if case.kind in ("dss_kernel", "s4_nplr_kernel", "s4d_kernel"):
        readout = tensors["W" if "W" in tensors else "C"]
        tensors["D"] = torch.randn(readout.shape[:2], dtype=readout.dtype)
    for kind in KINDS[case.kind].split():
        if (kind == "s4") == ("P" in tensors):
            yield kind, tensors


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {n: (t.dtype, t.shape, t.contiguous().numpy().tobytes()) for n, t in tensors.items()}


def test_vectors_name_every_layer() -> None:
    assert {kind for kinds in KINDS.values() for kind in kinds.split()} == LAYERS.keys()


@covers(*KINDS)
def test_a_layer_is_written_back_bit_by_bit(case: Case) -> None:
    for kind, tensors in layers(case):
        like = {name: torch.full_like(tensor, 3) for name, tensor in tensors.items()}
        written = write_layer(kind, read_layer(kind, tensors), like)
        assert bits(written) == bits(tensors)


@covers(*KINDS)
def test_every_official_tensor_is_needed_and_no_other(case: Case) -> None:
    for kind, tensors in layers(case):
        for name in tensors:
            with pytest.raises(InputError):
                read_layer(kind, {n: t for n, t in tensors.items() if n != name})
        with pytest.raises(InputError, match=r"'other\.weight', for which the model has no place"):
            read_layer(kind, {**tensors, "other.weight": torch.ones(2)})


@covers(*KINDS)
def test_what_the_official_layer_cannot_hold_is_refused(case: Case) -> None:
    for kind, tensors in layers(case):
        ours = read_layer(kind, tensors)
        for name, tensor in ours.items():
            with pytest.raises(InputError, match=f"our '{re.escape(name)}' is missing"):
                write_layer(kind, {n: t for n, t in ours.items() if n != name}, tensors)
            with pytest.raises(InputError, match="the official layer"):
                write_layer(kind, {**ours, name: torch.cat([tensor, tensor])}, tensors)
        with pytest.raises(InputError, match="cannot hold our 'other' exactly"):
            write_layer(kind, {**ours, "other": torch.ones(2)}, tensors)


@covers("s4_nplr_kernel")
def test_a_kernel_in_use_is_written_as_before_its_first_use(case: Case) -> None:
    ((kind, tensors),) = layers(case)
    stored = case.tensors()
    used = {"l_kernel": stored["l_kernel_after"], "C": stored["C_tilde_after_setup"]}
    ours = read_layer(kind, {**tensors, **used})
    written = write_layer(kind, ours, {**tensors, **used})
    assert written["l_kernel"] == 0
    assert bits(read_layer(kind, written)) == bits(ours)


@covers("s4d_layer")
def test_constants_of_the_official_layer_are_constants(case: Case) -> None:
    ((kind, tensors),) = layers(case)
    ours = read_layer(kind, tensors)
    with pytest.raises(InputError, match=r"cannot hold our 'ssm\.b' exactly"):
        write_layer(kind, {**ours, "ssm.b": 2 * ours["ssm.b"]}, tensors)


@covers("s4_nplr_kernel")
def test_kernels_of_rank_two_are_refused(case: Case) -> None:
    ((kind, tensors),) = layers(case)
    for name in ("B", "P"):
        two = torch.cat([tensors[name]] * 2)
        with pytest.raises(InputError, match=f"{name} must have rank one, got 2: only .*legs"):
            read_layer(kind, {**tensors, name: two})


@covers("hyena_implicit_filter")
def test_filters_with_several_sines_are_refused(case: Case) -> None:
    ((kind, tensors),) = layers(case)
    name = "implicit_filter.3.freq"
    with pytest.raises(InputError, match="one sine module: all its freq must be equal"):
        read_layer(kind, {**tensors, name: tensors[name] + 1})


def test_unknown_layers_are_refused() -> None:
    with pytest.raises(InputError, match="unknown official layer 's6': did you mean"):
        read_layer("s6", {})
