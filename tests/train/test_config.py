from typing import Any

import pytest

from stateline.errors import InputError
from stateline.train.config import TrainConfig


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"log_every": 0}, "log_every must be at least 1, got 0"),
        ({"steps": 1.5}, "the training configuration wants steps to be int, got 1.5"),
        ({"lr": 0.0}, "lr must be positive, got 0.0"),
        ({"lr": float("nan")}, "wants lr to be a finite number, got nan"),
        ({"ssm_lr": -1e-3}, "ssm_lr must be positive, got -0.001"),
        ({"beta1": 1.0}, "beta1 must be from 0 to below 1, got 1.0"),
        ({"beta2": -0.1}, "beta2 must be from 0 to below 1, got -0.1"),
        ({"schedule": "lineer"}, "wants schedule to be one of constant, .*, got 'lineer'"),
        ({"schedule": "constant", "schedule_steps": 9}, "schedule_steps is for schedule=linear or"),
        ({"decay_steps": 9}, "decay_steps is for schedule=wsd, got schedule=cosine"),
        ({"schedule": "wsd", "decay_steps": 0}, "decay_steps must be at least 1, got 0"),
        ({"schedule": "wsd", "decay_steps": 1001}, "at most the 1000 updates of the schedule"),
        ({"schedule": "constant", "final_share": 0.1}, "final_share is for schedule=linear or"),
        ({"final_share": 1.1}, "final_share must be from 0 to 1, got 1.1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"clip": -1.0}, "clip must be at least 0, got -1.0"),
        ({"eval_every": -1}, "eval_every must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**63}, "wants seed to fit into 64 bits, got a larger number"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig(**change)
