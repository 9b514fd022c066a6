"""S4, S4D, DSS, S5 and HiPPO: kernels, outputs, states and steps of their official code."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.layers import DSS, S4D, S4SSM, S5SSM, AnyLayer, Bidirectional, DiagonalSSM
from stateline.models.convert.single_layers import read_layer
from stateline.ops.diagonal_ssm.reference import as_complex
from stateline.ops.hippo import diagonal_frequencies, diagonal_plus_low_rank, hippo, normal_form
from tests.parity.cases import Case, covers

EXACT = 1e-9
"""For float64, where the case is no stricter."""


def assert_near(found: Tensor, wanted: Tensor, limit: float = EXACT) -> None:
    """The same up to the limit, on the scale of the largest entry, of at least one."""
    scale = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found.to(wanted), wanted, rtol=0, atol=limit * scale)


def parameters(case: Case, prefix: str = "param.") -> dict[str, Tensor]:
    """Official parameters; a kernel gets a skip connection of zeros."""
    tensors = case.tensors()
    found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    readout = next(found[name] for name in ("C", "W") if name in found)
    return {**found, "D": torch.zeros(readout.shape[:2], dtype=readout.dtype)}


def impulse_response(layer: AnyLayer, length: int) -> Tensor:
    """Kernels as (output, channel, length)."""
    dtype = next(layer.parameters()).dtype
    impulse = F.pad(torch.ones(1, 1, layer.d_model, dtype=dtype), (0, 0, 0, length - 1))
    return by_output(layer, layer(impulse))[0]


def by_output(layer: AnyLayer, y: Tensor) -> Tensor:
    """Outputs as (batch, output, channel, length)."""
    return y.unflatten(-1, (-1, layer.d_model)).movedim(1, -1)


def walk(layer: AnyLayer, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """One step after the other."""
    outputs = []
    for x_t in x.unbind(dim=1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def response_to_silence(layer: AnyLayer, state: Any, length: int, like: Tensor) -> Tensor:
    """What a state alone still gives."""
    silence = torch.zeros(len(like), length, layer.d_model, dtype=like.dtype)
    return by_output(layer, layer.forward_chunk(silence, state)[0])


@covers("hippo_legs_dplr")
def test_the_hippo_system_and_its_normal_form(case: Case) -> None:
    size, wanted = case.about["N"], case.tensors()
    a, b, p = hippo("legs", size)
    for found, name in ((a, "A"), (b, "B"), (p, "P"), (a + p.mT @ p, "S_normal")):
        assert_near(found, wanted[name])
    values, low_rank, b_tilde = diagonal_plus_low_rank("legs", size)
    assert_near(values, wanted["Lambda"])
    # a phase of each eigenvector is arbitrary: what does not depend on it
    p_c, b_c = as_complex(low_rank[0]), as_complex(b_tilde)
    assert_near(b_c.abs().square(), wanted["inv_abs2_B"])
    assert_near(p_c.abs().square(), wanted["inv_abs2_P"])
    assert_near(torch.view_as_real((p_c.conj() * b_c).clone()), wanted["inv_conjP_B"])
    vectors = as_complex(normal_form("legs", size).vectors)
    normal = 2 * (vectors * as_complex(values) @ vectors.mH).real
    assert_near(normal, wanted["S_normal"])


def check_kernel(layer: AnyLayer, case: Case) -> None:
    """Kernels, outputs and states of a case of state-spaces/s4, in every verb."""
    wanted, limit = case.tensors(), min(case.about["atol"], EXACT)
    half, x = case.about["L"] // 2, wanted["u"].mT
    for name, length in (("K", case.about["L"]), ("K_long", case.about["L_long"])):
        assert_near(impulse_response(layer, length), wanted[name], limit)
    assert_near(by_output(layer, layer(x)), wanted["y"], limit)
    y_step, after = walk(layer, x, layer.init_state(len(x)))
    assert_near(by_output(layer, y_step), wanted["y"], limit)
    modes = after.h.shape[2]
    assert_near(after.h, wanted["state_after"][:, :, :modes], limit)
    _, state = layer.forward_chunk(x[:, :half], layer.init_state(len(x)))
    assert_near(state.h, wanted["state_half"][:, :, :modes], limit)
    length = wanted["K_state_half"].shape[-1]
    assert_near(response_to_silence(layer, state, length, x), wanted["K_state_half"], limit)
    y, end = layer.forward_chunk(x[:, half:], state)
    assert_near(by_output(layer, y), wanted["y"][..., half:], limit)
    assert_near(end.h, wanted["state_after"][:, :, :modes], limit)


def s4(case: Case, tensors: Mapping[str, Tensor]) -> S4SSM:
    """Our layer with official parameters."""
    config = case.about["config"]
    layer = S4SSM(
        config["d_model"],
        d_state=config["d_state"],
        n_ssm=config["n_ssm"],
        n_outputs=config["channels"],
    ).double()
    layer.load_state_dict(read_layer("s4", tensors))
    return layer


@covers("s4_nplr_kernel")
def test_the_diagonal_plus_low_rank_kernel(case: Case) -> None:
    check_kernel(s4(case, parameters(case)), case)


@covers("s4_nplr_kernel")
@pytest.mark.parametrize("suffix", ["", "_long"])
def test_the_readout_is_recovered_from_what_the_official_code_stores(
    case: Case, suffix: str
) -> None:
    tensors, given = case.tensors(), parameters(case)
    used = {"l_kernel": tensors[f"l_kernel_after{suffix}"]}
    stored = "C_tilde_after_setup" if not suffix else "C_tilde_after_long"
    layer = s4(case, {**given, **used, "C": tensors[stored]})
    assert_near(layer.c, given["C"].flatten(0, 1))


@covers("s4_nplr_kernel")
def test_the_transition_of_the_dense_step(case: Case) -> None:
    """The official step is dense, on both halves of the modes: ours moves a state likewise."""
    layer, wanted = s4(case, parameters(case)), case.tensors()
    state = layer.init_state(2)
    h = torch.randn(state.h.shape, dtype=torch.float64)
    moved = layer.step(torch.ones(2, layer.d_model, dtype=torch.float64), state._replace(h=h))[1].h
    half = as_complex(h)
    both = torch.cat([half, half.conj()], dim=-1)
    a, b = as_complex(wanted["dA"]), as_complex(wanted["dB"])
    expected = (a @ both[..., None])[..., 0] + b
    assert_near(moved, torch.view_as_real(expected[..., : half.shape[-1]].clone()))


@covers("s4_fftconv_layer")
def test_the_layer_of_several_readouts(case: Case) -> None:
    tensors = case.tensors()
    official = {
        name.removeprefix("param.").removeprefix("kernel."): t
        for name, t in tensors.items()
        if name.startswith("param.")
    }
    n_outputs, d_model, modes, _ = official["C"].shape
    sizes = {"d_state": 2 * modes, "n_ssm": official["B"].shape[1], "n_outputs": n_outputs}
    layer: AnyLayer
    if "P" in official:
        layer = S4SSM(d_model, **sizes).double()
        layer.load_state_dict(read_layer("s4", official))
    else:
        layer = DiagonalSSM(d_model, discretization="zoh", **sizes).double()
        layer.load_state_dict(read_layer("diagonal_ssm", official))
    limit = min(case.about["atol"], EXACT)
    x, wanted = tensors["u"].mT, tensors["y"].mT
    assert_near(layer(x), wanted, limit)
    assert_near(walk(layer, x, layer.init_state(len(x)))[0], wanted, limit)


def options(case: Case) -> dict[str, Any]:
    """The settings of a case, with those that official code takes as keyword arguments."""
    config = case.about["config"]
    return {**config, **config.get("kernel_args", {}), **config.get("kw", {})}


def real_transform(config: Mapping[str, Any]) -> Any:
    """H3's code names it ``real_type``, state-spaces/s4 ``real_transform``."""
    return config.get("real_transform", config.get("real_type", "exp"))


def diagonal(case: Case) -> DiagonalSSM:
    """Our layer with the official parameters, in either of the two ways to describe a kernel."""
    config, given = options(case), parameters(case)
    layer = DiagonalSSM(
        config.get("d_model", config.get("H")),
        d_state=config.get("d_state", config.get("N")),
        n_ssm=config.get("n_ssm"),
        n_outputs=config.get("channels", 1),
        discretization=config.get("disc", "bilinear"),
        real_transform=real_transform(config),
    )
    layer = layer.to(given["C"].dtype)
    layer.load_state_dict(read_layer("diagonal_ssm", given))
    return layer


def faster(layer: DiagonalSSM, rate: float) -> DiagonalSSM:
    """The same with longer steps: a signal that is sampled at another rate."""
    with torch.no_grad():
        layer.log_dt.add_(math.log(rate))
    return layer


@covers("s4d_kernel")
def test_the_diagonal_kernel(case: Case) -> None:
    if "d_model" in case.about["config"]:  # as state-spaces/s4 describes it
        check_kernel(diagonal(case), case)
        return
    wanted = case.tensors()
    for dtype, suffix, limit in ((torch.float32, "", 1e-5), (torch.float64, "_f64", EXACT)):
        slow = diagonal(case).to(dtype)
        layer = faster(diagonal(case).to(dtype), case.about["config"].get("rate", 1.0))
        x, length = wanted["u"].mT.to(dtype), case.about["config"]["L"]
        begin = layer.init_state(len(x))._replace(h=wanted["state0"].to(dtype))
        assert_near(impulse_response(layer, length), wanted[f"kernel{suffix}"], limit)
        found = response_to_silence(layer, begin, length, x)
        assert_near(found, wanted[f"k_state{suffix}"], limit)
        assert_near(by_output(layer, layer(x)), wanted[f"conv_y{suffix}"], limit)
        # rates other than one change the official kernel, but not the official step
        log_a, b, _ = slow.weights()
        assert_near(torch.view_as_real(as_complex(log_a).exp()), wanted[f"dA{suffix}"], limit)
        assert_near(b, wanted[f"dB{suffix}"], limit)
        y, after = walk(slow, x, slow.init_state(len(x)))
        assert_near(by_output(slow, y), wanted[f"step_y{suffix}"], limit)
        assert_near(after.h, wanted[f"step_final_state{suffix}"], limit)
        name = f"forward_state_from_state0{suffix}"
        assert_near(slow.forward_chunk(x, begin)[1].h, wanted[name], limit)


@covers("s4d_kernel")
def test_the_initial_values_of_the_diagonal_kernel(case: Case) -> None:
    wanted, config = case.tensors(), options(case)
    about = "init_" if "init_A_imag" in wanted else "param."
    measure = config.get("measure", config.get("init")).removeprefix("diag").removeprefix("-")
    halves = [measure] if measure else ["inv", "lin"]  # "diag" alone is one half of each
    official = wanted[f"{about}A_imag"].float().chunk(len(halves))
    for found, half in zip(official, halves, strict=True):
        # the signs belong to either half of the modes; some official code has no frequency of zero
        ours = torch.as_tensor(diagonal_frequencies(half, found.shape[1]))
        ours = ours.abs().sort().values.clamp(min=1e-4)
        found = found.abs().clamp(min=1e-4).sort(dim=1).values
        torch.testing.assert_close(found, ours.expand_as(found), rtol=1e-5, atol=1e-6)
    decay = next(wanted[name] for name in wanted if name.startswith(about) and "A_real" in name)
    ours = DiagonalSSM(1, d_state=2, real_transform=real_transform(config)).log_decay.detach()
    assert_near(decay.float(), ours.expand_as(decay), 1e-6)


@covers("s4_nplr_kernel")
def test_the_initial_values_of_the_diagonal_plus_low_rank_kernel(case: Case) -> None:
    """But for B, which the official code clips: see ``diagonal_plus_low_rank``."""
    config, wanted = case.about["config"], parameters(case)
    assert config["init"] == "legs"
    fresh = S4SSM(config["d_model"], d_state=config["d_state"], n_ssm=config["n_ssm"])
    assert_near(fresh.log_decay.double(), wanted["A_real"], 1e-6)
    torch.testing.assert_close(-fresh.frequency.double(), wanted["A_imag"], rtol=1e-5, atol=1e-6)
    assert_near(fresh.p.norm(dim=-1).double(), wanted["P"][0].norm(dim=-1), 1e-6)


@covers("s4d_layer")
def test_the_s4d_layer_of_the_h3_baseline(case: Case) -> None:
    config, wanted = options(case), case.tensors()
    official = {n.removeprefix("param."): t for n, t in wanted.items() if n.startswith("param.")}
    layer = S4D(
        config["d_model"],
        d_state=config["d_state"],
        n_ssm=config.get("n_ssm", 1),
        discretization=config.get("disc", "zoh"),
        real_transform=real_transform(config),
    )
    layer.load_state_dict(read_layer("s4d", official))
    x = wanted["u"]
    assert_near(layer(x), wanted["y"], 2e-5)
    assert_near(walk(layer, x, layer.init_state(len(x)))[0], wanted["y_step"], 2e-5)
    with torch.no_grad():
        layer.ssm.skip.zero_()
    assert_near(impulse_response(layer.ssm, config["L"]), wanted["kernel"], 1e-5)


@covers("dss_kernel")
def test_the_kernels_of_dss(case: Case) -> None:
    config, wanted = case.about["config"], case.tensors()
    version = config["version"]
    kernel, _, variant = version.partition("-")
    layer = DSS(
        config["H"],
        d_state=config["N"],
        n_outputs=config["channels"],
        kernel=kernel,
        scale=variant != "no-scale",
        exp_frequency=variant == "re-im",
        tie_dt=not config["sep_dt_re_im"],
        filter_len=config["L"],
    ).ssm.double()
    layer.load_state_dict(read_layer("dss", parameters(case)))
    assert_near(torch.stack(layer.modes()[:1])[0], wanted["Lambda"])
    assert_near(layer.modes()[1], wanted["dt_Lambda"])
    # the official kernel is rounded to float32 at its end
    limit = min(case.about["atol"], 1e-6)
    assert_near(impulse_response(layer, config["L"]), wanted["K"], limit)
    x = wanted["u"].mT
    assert_near(by_output(layer, layer(x)), wanted["y"], limit)
    y = walk(layer, x, layer.init_state(len(x)))[0]
    assert_near(by_output(layer, y), wanted["y"], limit)


def s5(case: Case) -> S5SSM:
    """Our layer of the description, with its own initial values."""
    config = case.about["config"]
    return S5SSM(
        config["H"],
        d_state=config["ssm_size_base"],
        n_blocks=config["blocks"],
        conj_sym=config["conj_sym"],
        discretization=config["discretization"],
        clip_eigs=config["clip_eigs"],
        n_outputs=2 if config["bidirectional"] else 1,
    ).double()


@covers("s5_apply")
def test_s5_scans_and_steps(case: Case) -> None:
    wanted, limit = case.tensors(), min(case.about["atol"], EXACT)
    official = {n.removeprefix("param."): t for n, t in wanted.items() if n.startswith("param.")}
    weights, layer, x = read_layer("s5", official), s5(case), wanted["u"][None]
    if case.about["config"]["bidirectional"]:
        both = Bidirectional(layer, combine="sum")
        both.load_state_dict(weights)
        assert_near(both(x)[0], wanted["y"], limit)
    else:
        layer.load_state_dict(weights)
        assert_near(layer(x)[0], wanted["y"], limit)
        y, after = walk(layer, x, layer.init_state(1))
        assert_near(y[0], wanted["y"], limit)
        assert_near(after.h[0], wanted["state_last"], limit)
    log_a, b, _ = layer.weights()
    assert_near(torch.view_as_real(as_complex(log_a).exp()), wanted["Lambda_bar"], limit)
    assert_near(b, wanted["B_bar"], limit)
    _, chunked = layer.forward_chunk(x, layer.init_state(1))
    assert_near(chunked.h[0], wanted["state_last"], limit)


@covers("s5_apply")
def test_s5_begins_with_the_spectrum_of_hippo_in_blocks(case: Case) -> None:
    layer, wanted = s5(case), case.tensors()["Lambda"]
    found = torch.stack([layer.real, layer.frequency], dim=-1)
    for one, other in zip(found.mT, wanted.mT, strict=True):  # in whatever order
        assert_near(one.sort().values, other.sort().values, 1e-6)
