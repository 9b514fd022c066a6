"""Families of transformers that are sums of our layers, and those that are not."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from stateline.models.config import ModelConfig
from stateline.models.convert import decoders, gpt, hybrids, nemotron, qwen, recurrent_gemma
from stateline.models.convert.parts import Names, Part, read_parts, write_parts
from stateline.models.convert.to_mamba import has_conv_bias

Tensors = Mapping[str, Tensor]
Settings = Mapping[str, Any]


class Family(NamedTuple):
    """A family of decoders in the format of Hugging Face.

    Attributes:
        about: What it is, in a few words.
        config: Our configuration, from settings.
        names: How it calls its tensors.
        parts: All tensors of a model, from our configuration.
        settings: Settings, from our configuration and whether convolutions have biases.
    """

    about: str
    config: Callable[[Settings], ModelConfig]
    names: Names
    parts: Callable[[ModelConfig], list[Part]]
    settings: Callable[[ModelConfig, bool], dict[str, Any]]

    def read(self, tensors: Tensors, settings: Settings) -> dict[str, Tensor]:
        """Our tensors from theirs."""
        return read_parts(tensors, self.parts(self.config(settings)), self.names)

    def write(
        self, tensors: Tensors, config: ModelConfig
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Their tensors and settings from ours.

        Raises:
            InputError: If the family has no such model.
        """
        settings = self.settings(config, has_conv_bias(tensors))
        return write_parts(tensors, self.parts(config)), settings


def _decoder(kind: str, title: str) -> Family:
    return Family(
        f"{title} of Hugging Face transformers",
        decoders.decoder_config,
        decoders.NAMES,
        decoders.decoder_names,
        lambda config, _: decoders.decoder_settings(config, kind),
    )


def _gpt(kind: str, title: str) -> Family:
    return Family(
        f"{title} of Hugging Face transformers",
        gpt.gpt_config,
        gpt.NAMES[kind],
        partial(gpt.gpt_names, kind=kind),
        lambda config, _: gpt.gpt_settings(config, kind),
    )


def _qwen(kind: str, title: str) -> Family:
    return Family(
        f"{title} without experts of Hugging Face transformers",
        qwen.qwen_config,
        qwen.NAMES[kind],
        partial(qwen.qwen_names, kind=kind),
        lambda config, _: qwen.qwen_settings(config, kind),
    )


FAMILIES: Mapping[str, Family] = {
    "gpt2": _gpt("gpt2", "GPT-2"),
    "gpt_neo": _gpt("gpt_neo", "GPT-Neo"),
    "opt": _gpt("opt", "OPT"),
    "llama": _decoder("llama", "Llama"),
    "mistral": _decoder("mistral", "Mistral"),
    "qwen2": _decoder("qwen2", "Qwen2"),
    "qwen3": _decoder("qwen3", "Qwen3"),
    "granite": _decoder("granite", "Granite 3"),
    "bamba": Family(
        "Bamba of Hugging Face transformers",
        hybrids.mamba2_hybrid_config,
        hybrids.BAMBA,
        hybrids.bamba_names,
        lambda config, bias: hybrids.mamba2_hybrid_settings(config, "bamba", bias),
    ),
    "granitemoehybrid": Family(
        "Granite 4 hybrids without experts of Hugging Face transformers",
        hybrids.mamba2_hybrid_config,
        hybrids.GRANITE,
        hybrids.granite_names,
        lambda config, bias: hybrids.mamba2_hybrid_settings(config, "granitemoehybrid", bias),
    ),
    "lfm2": Family(
        "LFM2 of Hugging Face transformers",
        hybrids.lfm2_config,
        hybrids.LFM2,
        hybrids.lfm2_names,
        lambda config, _: hybrids.lfm2_settings(config),
    ),
    "nemotron_h": Family(
        "Nemotron-H without experts of Hugging Face transformers",
        nemotron.nemotron_h_config,
        nemotron.NAMES,
        nemotron.nemotron_h_names,
        nemotron.nemotron_h_settings,
    ),
    "qwen3_next": _qwen("qwen3_next", "Qwen3-Next"),
    "qwen3_5_text": _qwen("qwen3_5_text", "Qwen3.5"),
    "recurrent_gemma": Family(
        "RecurrentGemma of Hugging Face transformers",
        recurrent_gemma.recurrent_gemma_config,
        recurrent_gemma.NAMES,
        recurrent_gemma.recurrent_gemma_names,
        lambda config, _: recurrent_gemma.recurrent_gemma_settings(config),
    ),
}
"""By ``model_type``."""

MISSING: Mapping[str, str] = {
    "deepseek_v2": "latent attention and mixtures of experts",
    "deepseek_v3": "latent attention and mixtures of experts",
    "falcon_h1": "two mixers in one block",
    "gemma": "embeddings scaled in half precision",
    "gemma2": "normalisations after the branches and soft caps",
    "gemma3_text": "normalisations after the branches",
    "gpt_oss": "mixtures of experts and attention sinks",
    "jamba": "mixtures of experts",
    "kimi_linear": "Kimi Delta Attention",
    "lfm2_moe": "mixtures of experts",
    "mixtral": "mixtures of experts",
    "olmoe": "mixtures of experts",
    "qwen2_moe": "mixtures of experts",
    "qwen3_moe": "mixtures of experts",
    "xlstm": "the mLSTM",
    "zamba": "attention blocks that several layers share and that read the embeddings again",
    "zamba2": "attention blocks that several layers share and that read the embeddings again",
}
"""What keeps other families from being read, by ``model_type``."""
