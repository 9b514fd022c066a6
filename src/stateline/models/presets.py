"""Configurations of published models."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from stateline.errors import unknown_name
from stateline.models.config import PRESET_NAME, ModelConfig
from stateline.pattern import Value, runs


def _h3(
    d_model: int, n_layers: int, n_heads: int, attention: Collection[int], *, rotary: bool = False
) -> ModelConfig:
    """H3 with attention at the given layers, counted from 0.

    The vocabulary is GPT-2's, padded to a multiple of 8.
    """
    names = ["attention" if layer in attention else "h3" for layer in range(n_layers)]
    keywords: dict[str, Value] = {"n_heads": n_heads, "bias": True}
    if rotary:
        keywords |= {"position": "rope(fraction=0.5)"}
    return ModelConfig(
        runs(names), vocab_size=50_264, d_model=d_model, layers={"attention": keywords}
    )


def _mamba(d_model: int, n_layers: int) -> ModelConfig:
    """The vocabulary is GPT-NeoX's, padded to a multiple of 8."""
    return ModelConfig(f"mamba*{n_layers}", vocab_size=50_280, d_model=d_model, norm="rms")


def _pythia(d_model: int, n_layers: int, n_heads: int, vocab_size: int = 50_304) -> ModelConfig:
    """The vocabulary is padded to a multiple of 128 per device of tensor parallelism."""
    attention: dict[str, Value] = {
        "n_heads": n_heads,
        "position": "rope(fraction=0.25)",
        "bias": True,
    }
    return ModelConfig(
        f"attention*{n_layers}",
        vocab_size=vocab_size,
        d_model=d_model,
        block="parallel",
        feed_forward="gelu_exact",
        tie_embeddings=False,
        layers={"attention": attention},
    )


def _gpt2(d_model: int, n_layers: int, n_heads: int) -> ModelConfig:
    return ModelConfig(
        f"attention*{n_layers}",
        vocab_size=50_257,
        d_model=d_model,
        max_len=1024,
        layers={"attention": {"n_heads": n_heads, "bias": True}},
    )


def _windowed(pattern: str, *, d_hidden: int = 4096, n_heads: int = 8) -> ModelConfig:
    """Twelve layers with windows of 512, in the sizes of the official Block-Recurrent code."""
    sizes: dict[str, Value] = {"n_heads": n_heads, "window": 512}
    if n_heads != 8:
        sizes["d_head"] = 128
    window: dict[str, Value] = {"position": "t5", "includes_self": False, "qk_norm": True}
    return ModelConfig(
        pattern,
        vocab_size=32_000,
        d_model=1024,
        norm="rms",
        norm_eps=1e-6,
        feed_forward="relu",
        layers={
            "block_recurrent": {**sizes, "n_states": 512},
            "block_state": sizes,
            "feed_forward": {"d_hidden": d_hidden},
            "sliding_attention": sizes | window,
        },
    )


_FREE = "ssm=long_conv(filter_len=4096)"


def _block_state(keywords: str) -> ModelConfig:
    """Block-State layers at positions 1, 7 and 9, counted from 1."""
    bst, slide = f"block_state({keywords})", "sliding_attention"
    return _windowed(f"{bst} {slide}*5 {bst} {slide} {bst} {slide}*3")


def _large_block_state(keywords: str, n_heads: int = 8) -> ModelConfig:
    """Block-State layers at positions 1, 5, 7 and 9, and feed-forwards of twice the width."""
    bst, slide = f"block_state({keywords})", "sliding_attention"
    pattern = f"{bst} {slide}*3 {bst} {slide} {bst} {slide} {bst} {slide}*3"
    return _windowed(pattern, d_hidden=8192, n_heads=n_heads)


def _small(pattern: str) -> ModelConfig:
    """Twelve layers as wide as the smallest H3, with its feed-forwards and vocabulary."""
    attention: dict[str, Value] = {"n_heads": 12, "bias": True}
    return ModelConfig(pattern, vocab_size=50_264, d_model=768, layers={"attention": attention})


PRESETS: Mapping[str, ModelConfig] = {
    "brect-193m": _windowed("sliding_attention*9 block_recurrent sliding_attention*2"),
    "bst_mf-192m": _block_state("variant=mf, ssm=s4, n_states=32"),
    "bst_mf-198m-full": _block_state("variant=mf, ssm=s4, n_states=32, lift=full"),
    "bst_mf-295m": _large_block_state("variant=mf, ssm=s4, n_states=64"),
    "bst_mf-337m-full": _large_block_state("variant=mf, ssm=s4, n_states=64, lift=full", 12),
    "bst_mf_free-193m": _block_state(f"variant=mf, n_states=32, {_FREE}"),
    "bst_mf_free-199m-full": _block_state(f"variant=mf, n_states=32, lift=full, {_FREE}"),
    "bst_mf_free-297m": _large_block_state(f"variant=mf, n_states=64, {_FREE}"),
    "bst_mf_free-339m-full": _large_block_state(f"variant=mf, n_states=64, lift=full, {_FREE}", 12),
    "bst_mh-193m": _block_state("variant=mh, ssm=s4"),
    "bst_sh-193m": _block_state("variant=sh, ssm=s4"),
    "bst_sh-198m-full": _block_state("variant=sh, ssm=s4, lift=full"),
    "bst_sh-296m": _large_block_state("variant=sh, ssm=s4"),
    "bst_sh-337m-full": _large_block_state("variant=sh, ssm=s4, lift=full", 12),
    "bst_sh_free-193m": _block_state(f"variant=sh, {_FREE}"),
    "bst_sh_free-198m-full": _block_state(f"variant=sh, lift=full, {_FREE}"),
    "bst_sh_free-297m": _large_block_state(f"variant=sh, {_FREE}"),
    "bst_sh_free-338m-full": _large_block_state(f"variant=sh, lift=full, {_FREE}", 12),
    "gpt2-124m": _gpt2(768, 12, 12),
    "gpt2-355m": _gpt2(1024, 24, 16),
    "gpt2-774m": _gpt2(1280, 36, 20),
    "gpt2-1.5b": _gpt2(1600, 48, 25),
    "gss-106m": _small("gss*12"),
    "gss_attention-109m": _small("gss attention gss*5 attention gss*4"),
    "gss_hybrid-373m": _windowed("(gss*3 sliding_attention)*8"),
    "h3-125m": _h3(768, 12, 12, (6,)),
    "h3-125m-paper": _h3(768, 12, 12, (1, 7)),
    "h3_pure-125m": _small("h3(d_head=8)*12"),
    "h3-355m": _h3(1024, 24, 16, (8, 16)),
    "h3-355m-paper": _h3(1024, 24, 16, (1, 13)),
    "h3-1.3b": _h3(2048, 24, 16, (8, 16)),
    "h3-1.3b-paper": _h3(2048, 24, 16, (1, 13)),
    "h3-2.7b": _h3(2560, 32, 20, (10, 21), rotary=True),
    "h3-2.7b-3attn": _h3(2560, 32, 20, (8, 16, 24)),
    "mamba-130m": _mamba(768, 24),
    "mamba-370m": _mamba(1024, 48),
    "mamba-790m": _mamba(1536, 48),
    "mamba-1.4b": _mamba(2048, 48),
    "mamba-2.8b": _mamba(2560, 64),
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-2.8b": _pythia(2560, 32, 32),
    "pythia-6.9b": _pythia(4096, 32, 32, vocab_size=50_432),
    "pythia-12b": _pythia(5120, 36, 40, vocab_size=50_688),
    "s4d-103m": _small("s4d(n_ssm=1, init=inv)*12"),
    "slide-184m": _windowed("sliding_attention*12"),
    "txl-184m": _windowed("sliding_attention(window=2048)*12"),
}
"""Configurations by name. A preset's name may be given wherever a pattern is expected.

``h3-*`` are the models as their weights were released; ``-paper`` is what the paper describes where
it places attention elsewhere. Two forms of the largest were released: two attention layers with
rotary positions, and three without positions.

No weights of ``bst_*`` (Block-State, small and large, over S4 or ``free`` filters) and of its
baselines ``brect`` (Block-Recurrent), ``slide``, ``txl`` (Transformer-XL) and ``gss_hybrid`` were
released. Their widths and windows follow the official Block-Recurrent code; where the layers
stand and how many states they have is our reading of the paper; the sizes in their names are our
counts. All have 8 heads, except for the large ``-full`` models, which have 12 of the same width. In
``-full``, context states are mapped to the full width first (``lift=full``).

``h3_pure``, ``s4d``, ``gss`` and ``gss_attention`` are, with ``h3-125m-paper`` and ``gpt2-124m``,
the six models of table 3 of the H3 paper, all of twelve layers of width 768.

References:
    Radford et al., 2019 (GPT-2); Hutchins et al., "Block-Recurrent Transformers", NeurIPS 2022, and
    google-research/meliad; Fathi et al., "Block-State Transformers", NeurIPS 2023; Fu et al.,
    "Hungry Hungry Hippos", ICLR 2023, and HazyResearch/H3; Gu and Dao, "Mamba", 2023; Biderman et
    al., "Pythia", 2023.
"""


def find_preset(pattern: str) -> ModelConfig | None:
    """The preset of that name; ``None`` for anything that may be a pattern.

    Raises:
        InputError: If the text can only be the name of a preset, and there is none.

    Example:
        >>> find_preset("mamba-130m").d_model, find_preset("mamba*24")
        (768, None)
    """
    if pattern in PRESETS:
        return PRESETS[pattern]
    if PRESET_NAME.fullmatch(pattern):
        raise unknown_name("preset", pattern, PRESETS)
    return None


def configure(pattern: str, kind: type[ModelConfig] = ModelConfig, **settings: Any) -> ModelConfig:
    """The configuration of a pattern or a preset.

    Args:
        pattern: The layers, or the name of a preset, whose settings hold where none are given.
        kind: Class of the configuration. Only a language model gets its ``vocab_size`` from the
            preset.
        **settings: Further settings.

    Raises:
        InputError: If there is no such preset, or a setting cannot be used.

    Example:
        >>> config = configure("mamba-130m", vocab_size=256)
        >>> config.pattern, config.vocab_size, config.norm
        ('mamba*24', 256, 'rms')
    """
    preset = find_preset(pattern)
    if preset is None:
        return kind(pattern, **settings)
    own = {field.name: getattr(preset, field.name) for field in dataclasses.fields(preset)}
    if kind.kind != ModelConfig.kind:
        del own["vocab_size"]
    return kind(**{**own, **settings})
