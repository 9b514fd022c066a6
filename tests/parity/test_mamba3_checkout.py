"""Our Mamba-3 against the layer of state-spaces/mamba, with the recurrences of its own tests.

Run with ``--mamba=FOLDER``, a checkout of it; it needs einops. Its kernels need a GPU: the layer
calls the plain functions that its tests compare them with.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from stateline.layers import Mamba3
from tests.parity.models import assert_near

WIDTH, STATE, HEAD = 24, 8, 8
TRITON = "mamba_ssm.ops.triton"


@pytest.fixture
def official(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of its layer."""
    folder: Path | None = request.config.getoption("--mamba")
    if folder is None:
        pytest.skip("no checkout of state-spaces/mamba: name its folder with --mamba=FOLDER")

    def load(name: str, file: str) -> Any:
        spec = spec_from_file_location(name, folder / file)
        assert spec
        assert spec.loader
        monkeypatch.setitem(sys.modules, name, module := module_from_spec(spec))
        spec.loader.exec_module(module)
        return module

    def stand_in(name: str, **functions: Any) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    norms = load(f"{TRITON}.layernorm_gated", "mamba_ssm/ops/triton/layernorm_gated.py")
    norms.rmsnorm_fn = norms.rms_norm_ref
    for name in ("mamba3_siso_combined", "mamba3_siso_step"):
        stand_in(f"{TRITON}.mamba3.{name}", **{name: None})
    one = load("mamba3_siso", "tests/ops/triton/test_mamba3_siso.py").mamba3_siso_step_ref
    several = load("mamba3_mimo", "tests/ops/tilelang/test_mamba3_mimo.py").mamba3_MIMO_step_ref

    def by_token(*, chunk_size: int, **given: Any) -> Any:
        for name in ("Input_States", "return_final_states", "cu_seqlens"):
            assert not given.pop(name)
        return one(**given)[0]

    def by_tokens(**given: Any) -> Any:
        names = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z")
        return several(
            **{name: given[name] for name in (*names, "MIMO_V", "MIMO_Z")},
            MIMO_O=given["MIMO_Out"],
            fused_norm=given["fuse_pregate_headwise_rms_norm"],
            outproj_norm_weight=given["outproj_norm_weight"].view(-1, HEAD)
            if given["outproj_norm_weight"] is not None
            else None,
        )[0]

    stand_in(f"{TRITON}.mamba3.mamba3_siso_combined", mamba3_siso_combined=by_token)
    stand_in(f"{TRITON}.mamba3.mamba3_mimo_rotary_step", apply_rotary_qk_inference_fwd=None)
    stand_in("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo", mamba3_mimo=by_tokens)
    return load("mamba3_module", "mamba_ssm/modules/mamba3.py").Mamba3


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("out_norm", [False, True])
@pytest.mark.parametrize(("fraction", "groups"), [(0.5, 1), (1.0, 2)])
@torch.no_grad()
def test_a_mamba3_is_the_official_layer(
    official: Any, rank: int, out_norm: bool, fraction: float, groups: int
) -> None:
    torch.manual_seed(0)
    theirs = official(
        WIDTH,
        d_state=STATE,
        headdim=HEAD,
        ngroups=groups,
        rope_fraction=fraction,
        is_outproj_norm=out_norm,
        is_mimo=rank > 1,
        mimo_rank=rank,
    )
    for weight in theirs.parameters():
        weight.add_(0.3 * torch.randn_like(weight))
    ours = Mamba3(
        WIDTH,
        d_state=STATE,
        d_head=HEAD,
        n_groups=groups,
        rope_fraction=fraction,
        out_norm=out_norm,
        mimo_rank=rank,
    )
    names = {
        "in_proj.weight": "in_proj.weight",
        "out_proj.weight": "out_proj.weight",
        "dt_bias": "dt_bias",
        "b_bias": "B_bias",
        "c_bias": "C_bias",
        "b_weight": "B_norm.weight",
        "c_weight": "C_norm.weight",
        "skip": "D",
    }
    names |= {"mimo_in": "mimo_x", "mimo_gate": "mimo_z", "mimo_out": "mimo_o"} if rank > 1 else {}
    names |= {"norm_weight": "norm.weight"} if out_norm else {}
    found = theirs.state_dict()
    assert found.keys() == set(names.values())
    shapes = {name: weight.shape for name, weight in ours.state_dict().items()}
    ours.load_state_dict({name: found[old].view(shapes[name]) for name, old in names.items()})
    x = torch.randn(2, 41, WIDTH)
    wanted = theirs(x)
    assert_near(ours(x), wanted)
    _, state = ours.forward_chunk(x[:, :-1], ours.init_state(2))
    assert_near(ours.step(x[:, -1], state)[0], wanted[:, -1])
