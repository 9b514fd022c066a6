"""Context states of Block-State layers against a reference written from the paper's pseudo-code."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.layers import BlockState
from tests.parity.cases import Case, covers

VARIANTS = ("sh", "mh", "mf")


def with_official_filters(case: Case, variant: str) -> BlockState:
    """Our layer around the case's filters and skip connection, and its learned context."""
    about, tensors = case.about["config"], case.tensors()
    layer = BlockState(
        about["H"] * about["D"],
        n_heads=about["H"],
        window=about["W"],
        variant=variant,
        ssm=f"long_conv(filter_len={about['L']})",
        d_ssm=about["D"],
        n_states=about["S"],
    ).double()
    filters, skip = tensors[f"{variant}_filter"], tensors[f"{variant}_bias"]
    taps = filters.flatten(1).mT + F.pad(skip.flatten()[:, None], (0, about["L"] - 1))
    layer.ssm.first_taps = lambda _: taps
    with torch.no_grad():
        layer.narrow.weight.copy_(torch.eye(about["D"], layer.d_model))
        if layer.initial is not None:
            layer.initial.copy_(tensors["mf_init"])
    return layer


def widened(case: Case, u: Tensor) -> Tensor:
    """The input of the state space model, as an input that the layer narrows to it."""
    about = case.about["config"]
    return F.pad(u, (0, (about["H"] - 1) * about["D"]))


@covers("bst_context_collection")
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_context_states_of_every_block(case: Case, variant: str) -> None:
    layer, wanted = with_official_filters(case, variant), case.tensors()
    found = layer.context_states(widened(case, wanted["u"]))
    torch.testing.assert_close(found, wanted[f"{variant}_ctx"], rtol=0, atol=case.about["atol"])


@covers("bst_context_collection")
@torch.no_grad()
def test_which_context_states_of_its_block_a_token_sees(case: Case) -> None:
    """With one query for all, a changed state shows in the outputs that see it."""
    mask, window = case.tensors()["cross_mask"], case.about["config"]["W"]
    layer = with_official_filters(case, "sh")
    x = torch.randn(1, window, layer.d_model, dtype=torch.float64)
    context = layer.context_states(x)
    layer.local.out_proj.weight.zero_()
    before = layer(x)
    for state in range(window):
        changed = context.clone()
        changed[0, 0, state] += 1
        layer.context_states = lambda _, changed=changed: changed
        seen = (layer(x) - before).abs().amax(dim=(0, 2)) > 0
        assert torch.equal(seen, mask[:, state])
