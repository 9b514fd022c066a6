"""Models of this library as models of Hugging Face transformers.

Importing this module registers them, so that ``AutoModelForCausalLM.from_pretrained`` reads a
folder that ``stateline export`` has written. No code of the folder is run.
"""

from stateline.errors import InputError

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    raise InputError(
        "stateline.hf needs the package transformers: install stateline[hf]"
    ) from error

from stateline.hf.cache import StatelineCache
from stateline.hf.config import StatelineConfig
from stateline.hf.export import export
from stateline.hf.model import StatelineForCausalLM, wrap
from stateline.hf.tokenizers import tokenizer
from stateline.hf.trainer import OptimizerGroups

__all__ = [
    "OptimizerGroups",
    "StatelineCache",
    "StatelineConfig",
    "StatelineForCausalLM",
    "export",
    "tokenizer",
    "wrap",
]

AutoConfig.register(StatelineConfig.model_type, StatelineConfig, exist_ok=True)
AutoModelForCausalLM.register(StatelineConfig, StatelineForCausalLM, exist_ok=True)
