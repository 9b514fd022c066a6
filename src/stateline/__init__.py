"""Stateline: sequence models that mix state-space layers, attention and recurrence.

Names are imported when they are first used, so that the command line answers without PyTorch.
Functions for whole models have modules of their own: :mod:`stateline.generate`,
:mod:`stateline.evaluate`, :mod:`stateline.train`, :mod:`stateline.compare`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stateline.compare.comparison import Comparison as Comparison
    from stateline.errors import InputError as InputError
    from stateline.generate.model import Model as Model
    from stateline.generate.model import load as load
    from stateline.layers import LAYERS as LAYERS
    from stateline.layers import WRAPPERS as WRAPPERS
    from stateline.layers import SequenceLayer as SequenceLayer
    from stateline.layers import register_layer as register_layer
    from stateline.layers.law import check_layer as check_layer
    from stateline.layers.state import cat_states as cat_states
    from stateline.layers.state import detach as detach
    from stateline.layers.state import load_state as load_state
    from stateline.layers.state import nbytes as nbytes
    from stateline.layers.state import save_state as save_state
    from stateline.layers.state import select_rows as select_rows
    from stateline.layers.state import to as to
    from stateline.models.checkpoint import load_classifier as load_classifier
    from stateline.models.checkpoint import load_model as load_model
    from stateline.models.checkpoint import load_regressor as load_regressor
    from stateline.models.checkpoint import save_model as save_model
    from stateline.models.config import ModelConfig as ModelConfig
    from stateline.models.convert.table import load_pretrained as load_pretrained
    from stateline.models.language_model import LanguageModel as LanguageModel
    from stateline.models.sequence_head import ClassifierConfig as ClassifierConfig
    from stateline.models.sequence_head import RegressorConfig as RegressorConfig
    from stateline.models.sequence_head import SequenceClassifier as SequenceClassifier
    from stateline.models.sequence_head import SequenceRegressor as SequenceRegressor
    from stateline.models.size import count_parameters as count_parameters
    from stateline.models.size import match_width as match_width
    from stateline.ops import register_backend as register_backend
    from stateline.tasks import TASKS as TASKS
    from stateline.tasks import make_task as make_task
    from stateline.tasks import register_task as register_task
    from stateline.train.config import TrainConfig as TrainConfig

_NAMES = {
    "compare.comparison": ("Comparison",),
    "errors": ("InputError",),
    "generate.model": ("Model", "load"),
    "layers": ("LAYERS", "SequenceLayer", "WRAPPERS", "register_layer"),
    "layers.law": ("check_layer",),
    "layers.state": (
        "cat_states",
        "detach",
        "load_state",
        "nbytes",
        "save_state",
        "select_rows",
        "to",
    ),
    "models.checkpoint": ("load_classifier", "load_model", "load_regressor", "save_model"),
    "models.config": ("ModelConfig",),
    "models.convert.table": ("load_pretrained",),
    "models.language_model": ("LanguageModel",),
    "models.sequence_head": (
        "ClassifierConfig",
        "RegressorConfig",
        "SequenceClassifier",
        "SequenceRegressor",
    ),
    "models.size": ("count_parameters", "match_width"),
    "ops": ("register_backend",),
    "tasks": ("TASKS", "make_task", "register_task"),
    "train.config": ("TrainConfig",),
}
"""Exported names by the module that defines them."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_MODULE_OF)

if not TYPE_CHECKING:  # it would make every misspelled name right for type checkers

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'stateline' has no attribute {name!r}")
        value = getattr(import_module(f"stateline.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
