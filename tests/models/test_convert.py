"""Published weights: every form that their files have, and what is wrong with some."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.convert.gpt_neox import gpt_neox_config
from stateline.models.convert.table import CONVERTERS, load_pretrained, write_pretrained
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters

pytestmark = pytest.mark.cpu  # what is tested are files

TOKENS = torch.tensor([[1, 2, 0, 4, 3, 3]])

SIZES = {
    "model_type": "gpt_neox",
    "vocab_size": 5,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rotary_pct": 0.5,
}


def official(settings: dict[str, Any] = SIZES) -> dict[str, Tensor]:
    """Random tensors by official names."""
    torch.manual_seed(0)
    width, hidden, vocab = 8, 12, 5
    maps = {"attention.query_key_value": (3 * width, width), "attention.dense": (width, width)}
    maps |= {"mlp.dense_h_to_4h": (hidden, width), "mlp.dense_4h_to_h": (width, hidden)}
    shapes = {"gpt_neox.embed_in.weight": (vocab, width), "embed_out.weight": (vocab, width)}
    norms = ["gpt_neox.final_layer_norm"]
    for layer in range(settings["num_hidden_layers"]):
        start = f"gpt_neox.layers.{layer}"
        norms += [f"{start}.{name}" for name in ("input_layernorm", "post_attention_layernorm")]
        for name, (rows, columns) in maps.items():
            shapes[f"{start}.{name}.weight"] = (rows, columns)
            shapes[f"{start}.{name}.bias"] = (rows,)
    for name in norms:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def published(folder: Path, tensors: dict[str, Tensor] | None = None, **settings: Any) -> Path:
    """A folder as transformers saves it."""
    (folder / "config.json").write_text(json.dumps({**SIZES, **settings}))
    save_file(official() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def logits(model: LanguageModel) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)


@pytest.fixture
def wanted(tmp_path: Path) -> Tensor:
    (tmp_path / "whole").mkdir()
    return logits(load_pretrained(published(tmp_path / "whole")))


class TestFormsOfAFolder:
    """All give the same model."""

    @pytest.mark.parametrize("zipped", [True, False])  # the format since PyTorch 1.6, and before
    def test_pickled(self, tmp_path: Path, wanted: Tensor, zipped: bool) -> None:
        (published(tmp_path) / "model.safetensors").unlink()
        path = tmp_path / "pytorch_model.bin"
        torch.save(official(), path, _use_new_zipfile_serialization=zipped)
        assert torch.equal(logits(load_pretrained(tmp_path)), wanted)

    def test_by_the_file_of_its_weights(self, tmp_path: Path, wanted: Tensor) -> None:
        file = published(tmp_path) / "model.safetensors"
        assert torch.equal(logits(load_pretrained(file)), wanted)

    def test_beside_another_file_of_tensors(self, tmp_path: Path, wanted: Tensor) -> None:
        (published(tmp_path) / "model.safetensors").unlink()
        torch.save(official(), tmp_path / "pytorch_model.bin")
        torch.save({"moment": torch.ones(2)}, tmp_path / "optimizer.pt")
        assert torch.equal(logits(load_pretrained(tmp_path)), wanted)

    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
    def test_in_several_files(self, tmp_path: Path, wanted: Tensor, name: str) -> None:
        (published(tmp_path) / "model.safetensors").unlink()
        write = save_file if name.endswith("safetensors") else torch.save
        tensors, places = official(), {}
        for part in (0, 1):
            own = dict(list(tensors.items())[part::2])
            write(own, tmp_path / f"{part}-{name}")
            places |= dict.fromkeys(own, f"{part}-{name}")
        (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": places}))
        assert torch.equal(logits(load_pretrained(tmp_path)), wanted)

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
    def test_with_the_names_of_a_wrapped_module(
        self, tmp_path: Path, wanted: Tensor, prefix: str
    ) -> None:
        tensors = {prefix + name: tensor for name, tensor in official().items()}
        assert torch.equal(logits(load_pretrained(published(tmp_path, tensors))), wanted)

    def test_with_the_buffers_of_old_versions(self, tmp_path: Path, wanted: Tensor) -> None:
        tensors = official()
        tensors["gpt_neox.layers.1.attention.bias"] = torch.ones(1, 1, 4, 4).tril()
        tensors["gpt_neox.layers.1.attention.masked_bias"] = torch.tensor(-1e9)
        tensors["gpt_neox.layers.1.attention.rotary_emb.inv_freq"] = torch.ones(1)
        assert torch.equal(logits(load_pretrained(published(tmp_path, tensors))), wanted)

    def test_with_the_new_name_of_the_head(self, tmp_path: Path, wanted: Tensor) -> None:
        tensors = official()
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
        assert torch.equal(logits(load_pretrained(published(tmp_path, tensors))), wanted)

    def test_with_the_new_settings_of_rotary_positions(
        self, tmp_path: Path, wanted: Tensor
    ) -> None:
        new = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000}
        folder = published(tmp_path, rotary_pct=0.25, rotary_emb_base=7, rope_parameters=new)
        assert torch.equal(logits(load_pretrained(folder)), wanted)

    def test_saved_as_ours(self, tmp_path: Path, wanted: Tensor) -> None:
        save_model(load_pretrained(published(tmp_path)), tmp_path / "ours")
        assert torch.equal(logits(load_model(tmp_path / "ours")), wanted)


@pytest.mark.parametrize("with_copy", [True, False])
def test_a_tied_head_is_the_embedding(tmp_path: Path, with_copy: bool) -> None:
    tensors = official()
    tensors["embed_out.weight"] = tensors["gpt_neox.embed_in.weight"].clone()
    copied = logits(load_pretrained(published(tmp_path, tensors)))
    if not with_copy:
        del tensors["embed_out.weight"]
    tied = load_pretrained(published(tmp_path, tensors, tie_word_embeddings=True))
    assert tied.head is None
    torch.testing.assert_close(logits(tied), copied)


def test_attention_may_have_no_biases(tmp_path: Path) -> None:
    zeroed = {
        name: torch.zeros_like(tensor) if ".attention." in name and tensor.ndim == 1 else tensor
        for name, tensor in official().items()
    }
    biased = logits(load_pretrained(published(tmp_path, zeroed)))
    without = {n: t for n, t in zeroed.items() if not (".attention." in n and t.ndim == 1)}
    plain = load_pretrained(published(tmp_path, without, attention_bias=False))
    torch.testing.assert_close(logits(plain), biased)


QKV = "stack.layers.1.branches.0.layer.qkv.weight"


def test_queries_keys_and_values_lie_head_by_head() -> None:
    weight = official()["gpt_neox.layers.1.attention.query_key_value.weight"]
    ours = dict(CONVERTERS["gpt_neox"].read(official(), SIZES))[QKV]
    assert torch.equal(ours[:4], weight[:4])  # queries of head 0
    assert torch.equal(ours[4:8], weight[12:16])  # queries of head 1
    assert torch.equal(ours[8:12], weight[4:8])  # keys of head 0
    assert torch.equal(ours[20:], weight[20:])  # values of head 1


@torch.no_grad()
def test_a_model_shares_no_memory_with_the_tensors_that_it_is_made_from() -> None:
    tensors = official()
    for parameter in load_pretrained(tensors, settings=SIZES).parameters():
        parameter.zero_()
    assert all(tensors[name].equal(tensor) for name, tensor in official().items())


def test_a_published_model_is_in_evaluation_mode(tmp_path: Path) -> None:
    assert not load_pretrained(published(tmp_path)).training


def test_half_precision_stays(tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in official().items()}
    model = load_pretrained(published(tmp_path, half))
    assert {p.dtype for p in model.parameters()} == {torch.float16}


class TestWhatIsWrongIsNamed:
    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="nowhere: there is no such folder here"):
            load_pretrained(tmp_path / "nowhere")

    def test_no_weights(self, tmp_path: Path) -> None:
        (published(tmp_path) / "model.safetensors").unlink()
        for names in ((), ("one.pt", "two.pt")):  # of two, either may be meant
            for name in names:
                torch.save(official(), tmp_path / name)
            with pytest.raises(InputError, match=r"must hold model.safetensors or pytorch_model"):
                load_pretrained(tmp_path)

    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
    def test_damaged_weights(self, tmp_path: Path, name: str) -> None:
        (published(tmp_path) / "model.safetensors").unlink()
        (tmp_path / name).write_bytes(b"no tensors")
        with pytest.raises(InputError, match=rf"cannot read the weights in .*{name}"):
            load_pretrained(tmp_path)

    @pytest.mark.parametrize(
        "content", [b"", b"hello world\n", b"\x80", b"version https://git-lfs"]
    )
    def test_a_file_of_weights_that_is_none(self, tmp_path: Path, content: bytes) -> None:
        (published(tmp_path) / "model.safetensors").unlink()
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(InputError, match=r"cannot read the weights"):
            load_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("held", "message"),
        [
            ([torch.ones(2)], "does not hold tensors by name"),
            ({"steps": 3}, "does not hold tensors by name"),
            ({"pytorch-lightning_version": "2.0"}, "the published weights lack "),
        ],
    )
    def test_a_pickled_file_without_tensors(self, tmp_path: Path, held: Any, message: str) -> None:
        (published(tmp_path) / "model.safetensors").unlink()
        torch.save(held, tmp_path / "pytorch_model.bin")
        with pytest.raises(InputError, match=message):
            load_pretrained(tmp_path)

    def test_code_in_a_pickled_file_is_not_run(self, tmp_path: Path) -> None:
        class Trap:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (tmp_path / "sprung",)

        (published(tmp_path) / "model.safetensors").unlink()
        torch.save({"gpt_neox.embed_in.weight": Trap()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(InputError, match=r"pytorch_model.bin: it is damaged, or holds more"):
            load_pretrained(tmp_path)
        assert not (tmp_path / "sprung").exists()

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "config.json is not JSON"), ("[]", "must be a JSON object, got a list")],
    )
    def test_damaged_settings(self, tmp_path: Path, text: str, message: str) -> None:
        (published(tmp_path) / "config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            load_pretrained(tmp_path)

    def test_missing_tensors(self, tmp_path: Path) -> None:
        tensors = {n: t for n, t in official().items() if "layers.1.mlp.dense_h" not in n}
        message = r"lack 'gpt_neox.layers.1.mlp.dense_h_to_4h.bias' and 1 more"
        with pytest.raises(InputError, match=message):
            load_pretrained(published(tmp_path, tensors))

    def test_unexpected_tensors(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"hold 'gpt_neox.layers.1.* and 11 more, for which"):
            load_pretrained(published(tmp_path, num_hidden_layers=1))

    @pytest.mark.parametrize("prefix", ["ema.", "z_ema.", "gpt_neox."])
    @pytest.mark.parametrize("first", ["own", "other"])
    def test_a_second_model_with_a_prefix(self, tmp_path: Path, prefix: str, first: str) -> None:
        other = {prefix + name: tensor + 1 for name, tensor in official().items()}
        both = official() | other if first == "own" else other | official()
        (published(tmp_path) / "model.safetensors").unlink()
        torch.save(both, tmp_path / "pytorch_model.bin")
        with pytest.raises(InputError, match=rf"hold '{prefix}\S+' and \d+ more, for which"):
            load_pretrained(tmp_path)

    def test_a_tensor_in_two_files(self, tmp_path: Path) -> None:
        (published(tmp_path) / "model.safetensors").unlink()
        tensors, files = official(), ["model-1.safetensors", "model-2.safetensors"]
        name = next(iter(tensors))
        save_file(tensors, tmp_path / files[0])
        save_file({name: tensors[name] + 1}, tmp_path / files[1])
        places = dict.fromkeys(tensors, files[0]) | {"another": files[1]}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        message = rf"in one file, but .*model-1.safetensors and model-2.safetensors .* '{name}'"
        with pytest.raises(InputError, match=message):
            load_pretrained(tmp_path)

    def test_tensors_of_another_shape(self, tmp_path: Path) -> None:
        message = r"'embedding.weight' wants the shape \(6, 8\), got \(5, 8\)"
        with pytest.raises(InputError, match=message):
            load_pretrained(published(tmp_path, vocab_size=6))

    def test_heads_that_cannot_divide_them(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="n_heads must divide d_model, got n_heads=5"):
            load_pretrained(published(tmp_path, num_attention_heads=5))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": None}, "must have 'hidden_size', an integer .*, got None"),
            ({"num_hidden_layers": 0}, "must have 'num_hidden_layers', .*, got 0"),
            ({"hidden_act": "mish"}, "unknown activation 'mish': Known: gelu, "),
            (
                {"rope_scaling": {"type": "dynamic"}},
                "rotary positions scaled by 'dynamic' are not supported",
            ),
            ({"rope_parameters": ["default"]}, "wants 'rope_parameters' to be an object"),
            (
                {"rope_parameters": {"rope_type": "dynamic"}},
                "rotary positions scaled by 'dynamic' are not supported",
            ),
            ({"rotary_pct": "much"}, "wants 'rotary_pct' to be a number, got 'much'"),
        ],
    )
    def test_settings(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            load_pretrained(published(tmp_path, **change))


def test_an_index_points_to_no_other_folder(tmp_path: Path) -> None:
    inside, places = tmp_path / "inside", dict.fromkeys(official(), "../part.safetensors")
    inside.mkdir()
    (published(inside) / "model.safetensors").unlink()
    save_file(official(), tmp_path / "part.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(
        InputError, match=r"cannot read the weights file .*inside/part.safetensors: No such"
    ):
        load_pretrained(inside)


@pytest.mark.parametrize(("act", "ours"), [("gelu", "gelu_exact"), ("gelu_new", "gelu")])
def test_each_gelu_is_the_one_that_is_meant(act: str, ours: str) -> None:
    assert gpt_neox_config({**SIZES, "hidden_act": act}).feed_forward == ours


def test_official_rotary_models_of_repeat_after_me_are_gpt_neox(wanted: Tensor) -> None:
    assert torch.equal(
        logits(load_pretrained(official(), settings={**SIZES, "position": "rope"})), wanted
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", ["none", "alibi", "hard_alibi"])
def test_entries_that_count_twice_in_repeat_after_me_are_twice_as_large(
    position: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """All but the first quarter of the entries of each query; written, they are as before."""
    tensors = {name: t.to(dtype) for name, t in official().items()}
    settings = {**SIZES, "position": position, "masked_heads": 1}
    model = load_pretrained(tensors, settings=settings)
    layer = model.stack.links[0].branches[0].layer
    assert str(layer.settings.position) == position.replace(
        "hard_alibi", "hard_alibi(masked_heads=1)"
    )
    heads = tensors["gpt_neox.layers.0.attention.query_key_value.weight"].view(2, 3, 4, 8)
    factor = torch.tensor([1, 2, 2, 2])[:, None]
    queries = layer.qkv.weight[:8].view(2, 4, 8)
    assert queries.equal(factor * heads[:, 0])
    assert layer.qkv.weight[8:].view(2, 2, 4, 8).equal(heads[:, 1:].transpose(0, 1))
    write_pretrained(model, tmp_path / "back", "repeat_after_me")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(back[name].equal(tensor) for name, tensor in tensors.items())


class OfficialLSTM(nn.Module):
    """With the names of the official one."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(5, 8)
        self.lstm = nn.LSTM(8, 8, 3, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.word_embeddings(tokens))[0])


def test_the_official_lstm_is_embedding_lstm_and_head() -> None:
    torch.manual_seed(0)
    theirs = OfficialLSTM()
    ours = load_pretrained(theirs.state_dict())
    torch.testing.assert_close(logits(ours), theirs(TOKENS).detach())


def test_an_lstm_with_a_gap_is_refused() -> None:
    tensors = OfficialLSTM().state_dict()
    del tensors["lstm.bias_hh_l2"]
    with pytest.raises(InputError, match=r"lack 'lstm.bias_hh_l2'"):
        load_pretrained(tensors)


def test_the_models_of_repeat_after_me_have_their_sizes() -> None:
    """151.2 and 33.6 million parameters at 30 tokens, as the official code builds them."""
    large = {"vocab_size": 30, "hidden_size": 1024, "intermediate_size": 4096}
    settings = {**large, "num_hidden_layers": 12, "num_attention_heads": 16}
    assert count_parameters(gpt_neox_config(settings)) == pytest.approx(151.2e6, abs=0.05e6)
    plain = {"block": "plain", "norm": "none", "tie_embeddings": False, "head_bias": True}
    lstm = ModelConfig("lstm(n_layers=4)", vocab_size=30, d_model=1024, **plain)
    assert count_parameters(lstm) == pytest.approx(33.6e6, abs=0.05e6)
