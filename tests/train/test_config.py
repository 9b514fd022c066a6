from typing import Any

import pytest

from stateline.errors import InputError
from stateline.train.config import TrainConfig


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "wants steps to be int of at least 1, got 0"),
        ({"log_every": 0}, "wants log_every to be int of at least 1, got 0"),
        ({"steps": 1.5}, "wants steps to be int of at least 1, got 1.5"),
        ({"lr": 0.0}, "wants lr to be a finite number above 0, got 0.0"),
        ({"lr": float("nan")}, "wants lr to be a finite number above 0, got nan"),
        ({"ssm_lr": -1e-3}, "wants ssm_lr to be a finite number above 0 or none, got -0.001"),
        ({"beta1": 1.0}, "wants beta1 to be a finite number from 0 to below 1, got 1.0"),
        ({"beta2": -0.1}, "wants beta2 to be a finite number from 0 to below 1, got -0.1"),
        ({"schedule": "lineer"}, "wants schedule to be one of constant, .*, got 'lineer'"),
        ({"schedule": "constant", "schedule_steps": 9}, "schedule_steps is for schedule=linear or"),
        ({"decay_steps": 9}, "decay_steps is for schedule=wsd, got schedule=cosine"),
        (
            {"schedule": "wsd", "decay_steps": 0},
            "wants decay_steps to be int of at least 1 or none",
        ),
        ({"schedule": "wsd", "decay_steps": 1001}, "at most the 1000 updates of the schedule"),
        ({"schedule": "constant", "final_share": 0.1}, "final_share is for schedule=linear or"),
        (
            {"final_share": 1.1},
            "wants final_share to be a finite number from 0 to 1",
        ),
        (
            {"weight_decay": -0.1},
            "wants weight_decay to be a finite number of at least",
        ),
        ({"warmup_steps": -1}, "wants warmup_steps to be int of at least 0, got -1"),
        ({"clip": -1.0}, "wants clip to be a finite number of at least 0, got -1.0"),
        ({"eval_every": -1}, "wants eval_every to be int of at least 0, got -1"),
        ({"seed": -1}, "wants seed to be int of at least 0, got -1"),
        ({"seed": 2**63}, "wants seed to fit into 64 bits, got a larger number"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig(**change)
