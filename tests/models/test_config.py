from typing import Any

import pytest

from stateline.errors import InputError
from stateline.models.config import ModelConfig

FULL = ModelConfig(
    'ladder(attention(position=rope)*2, passes=3) h3(init="inv")',
    vocab_size=11,
    d_model=24,
    block="parallel",
    norm="rms",
    norm_eps=1e-6,
    feed_forward="swiglu",
    tie_embeddings=False,
    head_bias=True,
    max_len=99,
    layers={"h3": {"d_state": 8, "dt_max": 0.2}},
)


def test_every_setting_survives_json() -> None:
    assert ModelConfig.from_json(FULL.to_json()) == FULL


def test_what_is_not_set_has_its_default() -> None:
    config = ModelConfig.from_json('{"pattern": "h3", "vocab_size": 5}')
    assert config == ModelConfig("h3", vocab_size=5)


def test_equal_configurations_hash_alike() -> None:
    assert hash(ModelConfig.from_json(FULL.to_json())) == hash(FULL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"pattern": "h3", ', "the model configuration is not JSON"),
        ("[]", "must be a JSON object, got a list"),
        ("null", "must be a JSON object, got a NoneType"),
        ('{"vocab_size": 5}', "the model configuration lacks pattern"),
        ("{}", "lacks pattern, vocab_size"),
        (
            '{"pattern": "h3", "vocab_size": 5, "dmodel": 8}',
            "unknown keyword of the model configuration 'dmodel': did you mean 'd_model'",
        ),
    ],
)
def test_a_damaged_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        ModelConfig.from_json(text)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": 3}, "wants pattern to be str, got 3"),
        ({"vocab_size": "many"}, "wants vocab_size to be int from 1 to 16,777,216, got 'many'"),
        (
            {"norm": "group"},
            "wants norm to be one of layer, rms, rms_offset, batch, none, got 'group'",
        ),
        ({"feed_forward": "tanh"}, "wants feed_forward to be one of gelu, .*, got 'tanh'"),
        ({"tie_embeddings": 1}, "wants tie_embeddings to be bool, got 1"),
        ({"max_len": 1.5}, "wants max_len to be int from 1 to 16,777,216 or none, got 1.5"),
        (
            {"layers": ["h3"]},
            "wants layers to be a mapping from str to a mapping from str to .*, got",
        ),
        ({"vocab_size": 0}, "wants vocab_size to be int from 1 to 16,777,216, got 0"),
        ({"d_model": -4}, "wants d_model to be int from 1 to 16,777,216, got -4"),
        ({"max_len": 0}, "wants max_len to be int from 1 to 16,777,216 or none, got 0"),
        ({"block": "paralel"}, "wants block to be one of sequential, parallel, .*, got"),
        ({"norm_eps": 0.0}, "wants norm_eps to be a finite number above 0, got 0.0"),
        ({"head_bias": True}, "head_bias=True needs .* of its own: set tie_embeddings=False"),
    ],
)
def test_a_value_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig(**{"pattern": "h3", "vocab_size": 5, **change})
