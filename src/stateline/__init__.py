"""Stateline: sequence models that mix state-space layers, attention and recurrence.

Names are imported when they are first used, so that the command line answers without PyTorch.
Functions for whole models have modules of their own: :mod:`stateline.generate`,
:mod:`stateline.evaluate`, :mod:`stateline.train.loop`, :mod:`stateline.compare`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stateline.compare.comparison import Comparison
    from stateline.errors import InputError
    from stateline.generate.model import Model, load
    from stateline.layers import LAYERS, WRAPPERS, SequenceLayer, register_layer
    from stateline.layers.law import check_layer
    from stateline.layers.state import (
        cat_states,
        detach,
        load_state,
        nbytes,
        save_state,
        select_rows,
        to,
    )
    from stateline.models.checkpoint import load_classifier, load_model, load_regressor, save_model
    from stateline.models.config import ModelConfig
    from stateline.models.convert.table import load_pretrained
    from stateline.models.language_model import LanguageModel
    from stateline.models.sequence_head import (
        ClassifierConfig,
        RegressorConfig,
        SequenceClassifier,
        SequenceRegressor,
    )
    from stateline.models.size import count_parameters, match_width
    from stateline.ops import register_backend
    from stateline.tasks import TASKS, make_task, register_task
    from stateline.train.config import TrainConfig

_HOME = {
    "ClassifierConfig": "models.sequence_head",
    "Comparison": "compare.comparison",
    "InputError": "errors",
    "LAYERS": "layers",
    "LanguageModel": "models.language_model",
    "Model": "generate.model",
    "ModelConfig": "models.config",
    "RegressorConfig": "models.sequence_head",
    "SequenceClassifier": "models.sequence_head",
    "SequenceLayer": "layers",
    "SequenceRegressor": "models.sequence_head",
    "TASKS": "tasks",
    "TrainConfig": "train.config",
    "WRAPPERS": "layers",
    "cat_states": "layers.state",
    "check_layer": "layers.law",
    "count_parameters": "models.size",
    "detach": "layers.state",
    "load": "generate.model",
    "load_classifier": "models.checkpoint",
    "load_model": "models.checkpoint",
    "load_pretrained": "models.convert.table",
    "load_regressor": "models.checkpoint",
    "load_state": "layers.state",
    "make_task": "tasks",
    "match_width": "models.size",
    "nbytes": "layers.state",
    "register_backend": "ops",
    "register_layer": "layers",
    "register_task": "tasks",
    "save_model": "models.checkpoint",
    "save_state": "layers.state",
    "select_rows": "layers.state",
    "to": "layers.state",
}

__all__ = [
    "LAYERS",
    "TASKS",
    "WRAPPERS",
    "ClassifierConfig",
    "Comparison",
    "InputError",
    "LanguageModel",
    "Model",
    "ModelConfig",
    "RegressorConfig",
    "SequenceClassifier",
    "SequenceLayer",
    "SequenceRegressor",
    "TrainConfig",
    "cat_states",
    "check_layer",
    "count_parameters",
    "detach",
    "load",
    "load_classifier",
    "load_model",
    "load_pretrained",
    "load_regressor",
    "load_state",
    "make_task",
    "match_width",
    "nbytes",
    "register_backend",
    "register_layer",
    "register_task",
    "save_model",
    "save_state",
    "select_rows",
    "to",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stateline' has no attribute {name!r}")
    value = getattr(import_module(f"stateline.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
