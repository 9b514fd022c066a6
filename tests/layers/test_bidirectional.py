"""Bidirectional layers: both causal runs by hand, rows of their own lengths, and no state."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stateline import check_layer
from stateline.capacity import longest_copy
from stateline.cli import main
from stateline.errors import InputError
from stateline.layers import LAYERS, S5SSM, WRAPPERS, Bidirectional
from stateline.layers.wrappers.bidirectional import reverse
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.sequence_head import ClassifierConfig, SequenceClassifier

WIDTH = 4


@pytest.mark.parametrize("kind", ["s4d", "h3", "lstm", "attention", "feed_forward"])
def test_it_is_both_causal_runs_joined(kind: str) -> None:
    core = LAYERS[kind](WIDTH).double()
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    there, back = core(x), core(x.flip(1)).flip(1)
    torch.testing.assert_close(Bidirectional(core, combine="sum")(x), there + back)
    both = Bidirectional(core).double()
    assert isinstance(both.out_proj, nn.Linear)
    torch.testing.assert_close(both(x), both.out_proj(torch.cat([there, back], dim=2)))


def test_a_core_of_two_signals_has_a_readout_for_each_direction() -> None:
    core = S5SSM(WIDTH, d_state=8, n_outputs=2)
    x = torch.randn(2, 7, WIDTH)
    wanted = core(x)[..., :WIDTH] + core(x.flip(1)).flip(1)[..., WIDTH:]
    torch.testing.assert_close(Bidirectional(core, combine="sum")(x), wanted)


@pytest.mark.parametrize("pattern", ["bidirectional(s4d) lstm", "ladder(bidirectional(h3))"])
@pytest.mark.parametrize("block", ["sequential", "parallel", "post_norm"])
def test_padding_has_no_part_in_an_answer(pattern: str, block: str) -> None:
    settings = ClassifierConfig(pattern, d_model=8, n_channels=3, n_classes=4, block=block)
    model = SequenceClassifier(settings).double().eval()
    x = model.example_input(3, 9)
    x[1, 5:], x[2, 1:] = 1e3, -7.0
    together = model.classify(x, torch.tensor([9, 5, 1]))
    alone = [model.classify(x[:1]), model.classify(x[1:2, :5]), model.classify(x[2:, :1])]
    torch.testing.assert_close(together, torch.cat(alone))
    assert not torch.allclose(together[1], model.classify(x)[1])


def test_every_output_depends_on_the_whole_row() -> None:
    layer = Bidirectional(LAYERS["s4d"](WIDTH))
    x = torch.randn(1, 6, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[0, 2].sum(), x)
    assert (gradient[0] != 0).any(dim=1).all()


def test_rows_are_reversed_within_their_length() -> None:
    x = torch.arange(8.0).view(2, 4, 1)
    found = reverse(x, torch.tensor([3, 4]))[..., 0]
    assert found.tolist() == [[2, 1, 0, 3], [7, 6, 5, 4]]


def test_in_a_pattern_the_core_is_bare_and_stands_in_a_block() -> None:
    config = ModelConfig("bidirectional(s4d(output=glu), combine=sum)*2", 5, d_model=8)
    stack = LanguageModel(config).stack
    kinds = [type(link.layer).__name__ for link in stack.links]
    assert kinds == ["Bidirectional", "FeedForward"] * 2
    core = stack.links[0].layer.core
    assert [type(layer).__name__ for layer in core.links] == ["S4D"]


def test_what_needs_a_causal_layer_refuses_it() -> None:
    layer = Bidirectional(LAYERS["s4d"](WIDTH))
    model = LanguageModel(ModelConfig("lstm bidirectional(s4d)", 5, d_model=WIDTH))
    x = torch.zeros(1, 3, WIDTH)
    refused = [
        lambda: layer.init_state(1),
        lambda: layer.forward_chunk(x, ()),
        lambda: layer.step(x[:, 0], ()),
        lambda: check_layer(layer),
        lambda: longest_copy(model),
        lambda: model(model.example_input(1, 3)),
        lambda: model.init_state(1),
        *(lambda w=w: WRAPPERS[w](layer) for w in ("bidirectional", "staircase", "state_passing")),
    ]
    for call in refused:
        with pytest.raises(InputError, match=r"needs causal layers.*no state and no steps"):
            call()
    for name in ("cached_staircase", "feedback"):
        with pytest.raises(InputError, match="Bidirectional"):
            WRAPPERS[name](layer)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["check", "bidirectional(s4d)"], 2),
        (["capacity", "bidirectional(s4d)"], 2),
        (["train", "bidirectional(s4d)", "--task", "copying", "--out", "new"], 2),
        (["info", "bidirectional(s4d)"], 0),
    ],
)
def test_commands_refuse_it_in_one_line_or_describe_it(
    command: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == code
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert "Bidirectional" in printed.out if code == 0 else "needs causal layers" in lines[-1]
    assert len(lines) == (code != 0)


def test_forecasts_refuse_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(8, 6, 2)))
    task = f"signals(path={tmp_path / 'rows.npy'}, target=next, loss=l1, batch_size=4)"
    out = str(tmp_path / "run")
    assert main(["train", "bidirectional(s4d)", "--task", task, "--out", out]) == 2
    assert "the prediction of what follows needs causal layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("core", "combine", "message"),
    [
        (S5SSM(WIDTH, n_outputs=3), "sum", "got 12 signals and d_model=4: take combine=project"),
        (S5SSM(WIDTH), "mean", "combine to be one of project, sum, got 'mean'"),
    ],
)
@pytest.mark.usefixtures("unannotated")
def test_what_cannot_be_combined_is_refused(core: S5SSM, combine: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Bidirectional(core, combine=combine)  # type: ignore[arg-type]
