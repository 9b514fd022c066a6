"""Losses of distillation against the code of MOHAWK and LoLCATs, on the same tensors.

Run with ``--mohawk=FOLDER`` and ``--lolcats=FOLDER``, checkouts of goombalab/phi-mamba and
HazyResearch/lolcats; the mixing matrix of the former needs einops.
"""

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateline.layers import Mamba2
from stateline.train.distillation import SQUARES, distance, matrix_distance


def checkout(request: pytest.FixtureRequest, name: str) -> Path:
    folder: Path | None = request.config.getoption(f"--{name}")
    if folder is None:
        pytest.skip(f"no checkout of {name}: name its folder with --{name}=FOLDER")
    return folder


def load(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def loss_of_script(path: Path, **given: Any) -> Tensor:
    """The value that the only assignment to ``loss`` in a script gives."""
    found = [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "loss"
    ]
    (expression,) = found
    code = compile(ast.Expression(expression), str(path), "eval")
    value: Tensor = eval(code, {"torch": torch, **given})
    return value


def test_mixing_and_outputs_are_compared_as_in_mohawk(request: pytest.FixtureRequest) -> None:
    folder = checkout(request, "mohawk") / "assets"
    m, n = torch.rand(2, 3, 4, 9, 9).unbind()
    theirs = loss_of_script(folder / "mohawk_stage1.py", transfer_matrix=m, attn_matrix=n)
    torch.testing.assert_close(matrix_distance(m, n), theirs, rtol=1e-5, atol=0)
    f, g = torch.randn(2, 3, 9, 16).unbind()
    theirs = loss_of_script(
        folder / "mohawk_stage2.py", student_output={"hidden_states": f}, teacher_hstate=g
    )
    torch.testing.assert_close(distance(f, g), theirs, rtol=1e-5, atol=0)


def test_the_mixing_matrix_of_mamba2_is_that_of_mohawk(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkout(request, "mohawk") / "modules/mixers/discrete_mamba2_ref.py"
    pytest.importorskip("einops")
    official = load("discrete_mamba2_ref", path, monkeypatch)
    torch.manual_seed(0)
    layer = Mamba2(16, expand=1, d_head=4, d_state=8, n_groups=4).double()
    nn.init.zeros_(layer.a_log)  # steps alone decide how much is kept, as in the official layer
    nn.init.normal_(layer.skip)
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    with torch.no_grad():
        mixed, steps, _ = layer.project(x)
        (signals,), _ = layer.signals(layer.conv(mixed), steps, x.new_zeros(2, 11, 16))
        logits = steps.expm1().log()  # whose softplus gives the steps
        theirs = official.materialize_mixer(logits, signals.k, signals.q, None)
        ours = layer.mixing(x) - torch.diag_embed(layer.skip[:, None].expand(-1, 11))
        # The official layer divides its inputs by the steps.
        torch.testing.assert_close(ours / steps.mT[..., None, :], theirs, rtol=1e-5, atol=1e-5)
        whole = official.materialize_mixer(logits, signals.k, signals.q, layer.skip)
        torch.testing.assert_close(
            whole - theirs,
            torch.diag_embed(layer.skip[:, None].expand(-1, 11)).expand(2, -1, -1, -1),
        )


def test_squares_are_compared_as_in_lolcats(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkout(request, "lolcats") / "src" / "trainer"
    base: Any = ModuleType("theirs.default_lm")
    base.OurTrainer = object  # the loop of training, of which the loss needs nothing
    monkeypatch.setitem(sys.modules, "theirs", ModuleType("theirs"))
    monkeypatch.setitem(sys.modules, "theirs.default_lm", base)
    path = folder / "distill_attention_xent_mse.py"
    trainer = object.__new__(load("theirs.trainer", path, monkeypatch).OurTrainer)
    trainer.criterion_mse, trainer.mse_factor, trainer.xent_factor = nn.MSELoss(), SQUARES, 0
    layers = [torch.randn(2, 3, 9, 16).unbind() for _ in range(4)]

    class Model:
        device = torch.device("cpu")

        def __call__(self, **_: Any) -> Any:
            return SimpleNamespace(get=lambda _: [((None, None), pair) for pair in layers])

    theirs, _ = trainer.compute_loss(Model(), {"input_ids": torch.zeros(3, 9)})
    ours = SQUARES / len(layers) * torch.stack([F.mse_loss(*pair) for pair in layers]).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
