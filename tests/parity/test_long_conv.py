"""Implicit filters of Hyena, and the block of GSS."""

import torch
from torch import Tensor, nn

from stateline.layers import GSS, Residual
from stateline.layers.mixers.long_conv import ImplicitFilters
from stateline.models.convert.single_layers import read_layer
from tests.parity.cases import Case, covers


def parameters(case: Case) -> dict[str, Tensor]:
    return {n[6:]: t for n, t in case.tensors().items() if n.startswith("param.")}


def assert_exact(case: Case, found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=case.about["atol"])


def filters(case: Case) -> ImplicitFilters:
    about = case.about["config"]
    return ImplicitFilters(
        about["d_model"],
        filter_len=about["seq_len"],
        n_features=about["emb_dim"],
        d_hidden=about["order"],
        n_hidden=about["num_inner_mlps"],
        frequency=float(about["w"]),
        shift=float(about["shift"]),
    ).double()


def official_filters(case: Case) -> ImplicitFilters:
    layer = filters(case)
    layer.load_state_dict(read_layer("implicit_filters", parameters(case)))
    return layer


@covers("hyena_implicit_filter")
@torch.no_grad()
def test_implicit_filters_have_the_official_taps(case: Case) -> None:
    layer, wanted = official_filters(case), case.tensors()["filter"][0]
    layer.skip.zero_()
    assert_exact(case, layer.taps()[:, : len(wanted)].mT, wanted)


@covers("hyena_implicit_filter")
@torch.no_grad()
def test_implicit_filters_convolve_as_the_official_ones(case: Case) -> None:
    layer, tensors = official_filters(case), case.tensors()
    assert_exact(case, layer(tensors["x"].mT), tensors["y"].mT)


@covers("hyena_implicit_filter")
@torch.no_grad()
def test_implicit_filters_stream_as_the_official_ones_convolve(case: Case) -> None:
    layer, tensors = official_filters(case), case.tensors()
    x, outputs = tensors["x"].mT, []
    state = layer.init_state(len(x))
    for piece in x.split([x.shape[1] // 2, *[1] * (x.shape[1] - x.shape[1] // 2)], dim=1):
        y, state = layer.forward_chunk(piece, state)
        outputs.append(y)
    assert_exact(case, torch.cat(outputs, dim=1), tensors["y"].mT)


@covers("hyena_implicit_filter")
def test_implicit_filters_begin_with_the_official_features(case: Case) -> None:
    layer, official = filters(case), read_layer("implicit_filters", parameters(case))
    limit = case.about["atol_if_posemb_regenerated"]
    for name in ("features", "times"):
        found = layer.state_dict()[name]
        torch.testing.assert_close(found, official[name], rtol=0, atol=limit)


def gss_block(case: Case) -> Residual:
    about = case.about["config"]
    layer = GSS(
        about["dim"],
        d_ssm=about["dss_kernel_H"],
        expand=about["dim_expansion_factor"],
        d_state=about["dss_kernel_N"],
        exp_frequency=about["lambda_imag_exp"],
    )
    block = Residual(layer, nn.LayerNorm(about["dim"])).double()
    block.load_state_dict(read_layer("gss", parameters(case)))
    return block


@covers("gss_block")
@torch.no_grad()
def test_the_block_of_gss_is_the_public_one(case: Case) -> None:
    tensors = case.tensors()
    assert_exact(case, gss_block(case)(tensors["x"]), tensors["y"])


@covers("gss_block")
@torch.no_grad()
def test_the_state_space_model_of_gss_is_the_public_one(case: Case) -> None:
    layer, tensors = gss_block(case).layer, case.tensors()
    assert isinstance(layer, GSS)
    assert_exact(case, layer.ssm(layer.norm(tensors["dss_x"])), tensors["dss_y"])


@covers("gss_block")
@torch.no_grad()
def test_the_block_of_gss_steps_as_the_public_one_convolves(case: Case) -> None:
    block, tensors = gss_block(case), case.tensors()
    state, outputs = block.init_state(len(tensors["x"])), []
    for x in tensors["x"].unbind(dim=1):
        y, state = block.step(x, state)
        outputs.append(y)
    assert_exact(case, torch.stack(outputs, dim=1), tensors["y"])
