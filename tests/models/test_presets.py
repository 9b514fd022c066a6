"""Sizes of published models.

Counts of parameters are those of their model cards and files: Pythia (its README), GPT-2
(transformers), Mamba (the ``-hf`` files on Hugging Face); of H3, those of the official code; of
Block-State models and their baselines, those that follow from the sizes of their layers.
"""

import dataclasses
import inspect
import json
from functools import cache

import pytest

from stateline.errors import InputError
from stateline.layers import AnyLayer, Attention, BlockRecurrent, BlockState, SlidingAttention
from stateline.layers.mixers.long_conv import ImplicitFilters
from stateline.layers.mixers.s4 import S4SSM
from stateline.models.config import ModelConfig
from stateline.models.convert.gpt_neox import gpt_neox_config
from stateline.models.convert.mamba import official_mamba_config
from stateline.models.language_model import LanguageModel
from stateline.models.presets import PRESETS, configure, find_preset
from stateline.models.sequence_head import ClassifierConfig
from stateline.models.size import meta_model

PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "mamba-130m": 129_135_360,
    "mamba-370m": 371_516_416,
    "mamba-790m": 793_204_224,
    "mamba-1.4b": 1_372_178_432,
    "mamba-2.8b": 2_768_345_600,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
}
H3_MILLIONS = {"h3-125m": 126.4, "h3-355m": 361.1, "h3-1.3b": 1326, "h3-2.7b": 2671}

WINDOWED = {
    "brect-193m": (193_292_408, [10], None, None),
    "bst_mf-192m": (191_576_952, [1, 7, 9], "mf", S4SSM),
    "bst_mf-295m": (295_175_296, [1, 5, 7, 9], "mf", S4SSM),
    "bst_mf_free-193m": (192_585_144, [1, 7, 9], "mf", ImplicitFilters),
    "bst_mf_free-297m": (297_305_984, [1, 5, 7, 9], "mf", ImplicitFilters),
    "bst_mf-198m-full": (197_563_896, [1, 7, 9], "mf", S4SSM),
    "bst_mf-337m-full": (336_828_608, [1, 5, 7, 9], "mf", S4SSM),
    "bst_sh-198m-full": (198_062_712, [1, 7, 9], "sh", S4SSM),
    "bst_sh-337m-full": (337_067_712, [1, 5, 7, 9], "sh", S4SSM),
    "bst_mh-193m": (192_646_776, [1, 7, 9], "mh", S4SSM),
    "bst_sh-193m": (192_555_384, [1, 7, 9], "sh", S4SSM),
    "bst_sh-296m": (296_168_576, [1, 5, 7, 9], "sh", S4SSM),
    "bst_sh_free-193m": (192_991_800, [1, 7, 9], "sh", ImplicitFilters),
    "bst_sh_free-297m": (296_750_464, [1, 5, 7, 9], "sh", ImplicitFilters),
    "slide-184m": (183_853_152, [], None, None),
}
"""Parameters, and which of the layers, counted from 1, hold states of which variant, over what."""


@cache
def built(name: str) -> LanguageModel:
    """The model of a preset, without weights."""
    return meta_model(PRESETS[name])


def size(name: str) -> int:
    return sum(p.numel() for p in built(name).parameters())


def parts(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters, by name."""
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def test_presets_have_as_many_parameters_as_the_published_models() -> None:
    assert {name: size(name) for name in PARAMETERS} == PARAMETERS
    millions = {name: size(name) / 1e6 for name in H3_MILLIONS}
    assert millions == pytest.approx(H3_MILLIONS, rel=4e-4)


@pytest.mark.slow
def test_every_other_preset_is_about_as_large_as_its_name_says() -> None:
    for name in sorted(PRESETS.keys() - PARAMETERS.keys()):
        number, unit = name.split("-")[1][:-1], name.split("-")[1][-1]
        said = float(number) * {"m": 1e6, "b": 1e9}[unit]
        assert size(name) == pytest.approx(said, rel=0.05), name


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_that_hold_states_stand_among_windows(name: str) -> None:
    config, (parameters, places, variant, ssm) = PRESETS[name], WINDOWED[name]
    holds = BlockRecurrent if variant is None else BlockState
    layers: list[AnyLayer] = [block.layer for block in built(name).stack.layers[::2]]
    kinds = [holds if place in places else SlidingAttention for place in range(1, 13)]
    assert [type(layer) for layer in layers] == kinds
    for layer in layers:
        local = getattr(layer, "local", layer)
        assert (layer.window, local.window, local.includes_self) == (512, 512, False)
        if isinstance(layer, BlockState):
            assert (layer.variant, type(layer.ssm)) == (variant, ssm)
    assert (config.norm, config.norm_eps, config.feed_forward) == ("rms", 1e-6, "relu")
    assert size(name) == parameters


def test_a_fourth_of_the_gss_hybrid_attends() -> None:
    layers = built("gss_hybrid-373m").stack.layers
    kinds = [type(block.layer).__name__ for block in layers]
    assert kinds == ["GSS", "GSS", "GSS", "SlidingAttention", "FeedForward"] * 8
    assert size("gss_hybrid-373m") == 372_659_264


@pytest.mark.parametrize("preset_name", [name for name in PRESETS if name.startswith("pythia")])
def test_a_pythia_is_what_its_published_settings_become(preset_name: str) -> None:
    preset = PRESETS[preset_name]
    attention = preset.layers["attention"]
    settings = {
        "vocab_size": preset.vocab_size,
        "hidden_size": preset.d_model,
        "intermediate_size": 4 * preset.d_model,
        "num_hidden_layers": int(preset.pattern.removeprefix("attention*")),
        "num_attention_heads": attention["n_heads"],
    }
    published = gpt_neox_config(settings)
    assert parts(meta_model(published)) == parts(built(preset_name))
    assert published.block == preset.block == "parallel"
    for name, value in attention.items():
        assert published.layers["attention"][name] == value


@pytest.mark.parametrize("preset_name", [name for name in PRESETS if name.startswith("mamba")])
def test_a_mamba_is_what_its_published_settings_become(preset_name: str) -> None:
    preset = PRESETS[preset_name]
    n_layer = int(preset.pattern.removeprefix("mamba*"))
    settings = {"d_model": preset.d_model, "n_layer": n_layer, "vocab_size": 50_277, "ssm_cfg": {}}
    published = official_mamba_config(settings)
    assert parts(meta_model(published)) == parts(built(preset_name))
    assert (published.norm, published.norm_eps) == (preset.norm, preset.norm_eps) == ("rms", 1e-5)


def test_attention_stands_where_the_official_h3_has_it() -> None:
    places = {
        "h3-125m": [6],
        "h3-125m-paper": [1, 7],
        "h3-355m": [8, 16],
        "h3-355m-paper": [1, 13],
        "h3-1.3b": [8, 16],
        "h3-1.3b-paper": [1, 13],
        "h3-2.7b": [10, 21],
        "h3-2.7b-3attn": [8, 16, 24],
    }
    for name, wanted in places.items():
        mixers = built(name).stack.layers[::2]
        assert [i for i, m in enumerate(mixers) if isinstance(m.layer, Attention)] == wanted


def test_the_rotary_h3_turns_half_of_each_head() -> None:
    assert PRESETS["h3-2.7b"].layers["attention"]["position"] == "rope(fraction=0.5)"
    assert built("h3-2.7b").stack.layers[20].layer.rotary.dims == 64


def test_a_pattern_is_no_preset() -> None:
    assert find_preset("h3(dt_min=1e-3)") is None


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown preset 'pythia-160': did you mean 'pythia-160m'"):
        find_preset("pythia-160")


def test_a_preset_may_be_named_wherever_a_pattern_is() -> None:
    assert configure("mamba-130m") == PRESETS["mamba-130m"]
    config = configure("mamba-130m", vocab_size=50)
    assert config == dataclasses.replace(PRESETS["mamba-130m"], vocab_size=50)
    assert config.pattern == "mamba*24"
    assert json.loads(config.to_json())["pattern"] == "mamba*24"


def test_given_settings_override_those_of_a_preset_even_with_the_defaults_of_all_models() -> None:
    assert PRESETS["mamba-130m"].norm == "rms"
    config = configure("mamba-130m", vocab_size=50, d_model=64, norm="layer")
    assert (config.d_model, config.norm) == (64, "layer")


def test_a_preset_may_become_a_classifier() -> None:
    config = configure("pythia-70m", ClassifierConfig, n_channels=3, n_classes=7)
    assert (config.vocab_size, config.d_model, config.block) == (1, 512, "parallel")


def test_the_name_of_no_preset_is_refused_in_place_of_a_pattern() -> None:
    with pytest.raises(InputError, match="unknown preset 'mamba-130': did you mean 'mamba-130m'"):
        configure("mamba-130", vocab_size=50)


def test_a_configuration_says_how_to_name_a_preset() -> None:
    with pytest.raises(InputError, match=r"if it is a preset, call stateline.models.presets.conf"):
        ModelConfig("mamba-130m", 50)


def test_a_configuration_holds_the_canonical_pattern() -> None:
    assert ModelConfig("( h3 *2 s4d)*1 (lstm)*3", 5).pattern == "h3*2 s4d lstm*3"
    assert str(inspect.signature(ModelConfig)).startswith("(pattern: str, vocab_size: ")
