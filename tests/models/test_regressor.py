from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stateline import check_layer
from stateline.errors import InputError
from stateline.models.checkpoint import load_classifier, load_regressor, save_model
from stateline.models.config import ModelConfig
from stateline.models.factory import make_model, read_config
from stateline.models.sequence_head import RegressorConfig, SequenceRegressor

NUMBERS = RegressorConfig("lstm attention", d_model=8, n_channels=3, n_values=2)
TOKENS = RegressorConfig("s4d", d_model=8, vocab_size=7, pooling="last")


def new_model(config: RegressorConfig = NUMBERS) -> SequenceRegressor:
    torch.manual_seed(0)
    return SequenceRegressor(config).double().eval()


@pytest.mark.parametrize("config", [NUMBERS, TOKENS])
def test_a_regressor_obeys_the_law(config: RegressorConfig) -> None:
    report = check_layer(new_model(config))
    assert report.ok, str(report)


def test_padding_does_not_change_a_prediction() -> None:
    model = new_model()
    x = model.example_input(2, 9)
    x[1, 5:] = 1e6
    alone = torch.cat([model.predict(x[:1]), model.predict(x[1:, :5])])
    torch.testing.assert_close(model.predict(x, torch.tensor([9, 5])), alone)
    assert alone.shape == (2, 2)


def test_a_target_at_every_position_can_be_learned() -> None:
    """Predict a running mean: pooling is left to the layers."""
    torch.manual_seed(0)
    model = SequenceRegressor(RegressorConfig("lstm", d_model=16, n_channels=1, pooling="last"))
    x = torch.randn(32, 20, 1)
    target = 0.9 * x + 0.1 * x.roll(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.cpu
def test_a_loaded_regressor_predicts_the_same_bits(tmp_path: Path) -> None:
    model = new_model()
    save_model(model, tmp_path)
    loaded, x = load_regressor(tmp_path), model.example_input(2, 5)
    assert loaded.config == NUMBERS
    assert loaded(x).equal(model(x))
    with pytest.raises(InputError, match="is a regressor, not a classifier: load_"):
        load_classifier(tmp_path)


def test_the_kind_in_the_configuration_decides(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(TOKENS.to_json())
    assert type(make_model(read_config(tmp_path / "config.json"))) is SequenceRegressor
    with pytest.raises(InputError, match="must be of a language_model, got 'regressor'"):
        ModelConfig.from_json(TOKENS.to_json())
    (tmp_path / "config.json").write_text('{"kind": "regresor"}')
    with pytest.raises(InputError, match="unknown kind of model 'regresor'"):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize("settings", [{"n_values": 0}, {"n_values": 1 << 40}])
def test_a_number_of_values_out_of_range_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="wants n_values to be"):
        RegressorConfig("s4d", **settings)
