"""Reading any published format, and writing it back."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stateline import load_pretrained
from stateline.cli import main
from stateline.data import ByteTokenizer
from stateline.errors import InputError
from stateline.generate import load_run
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.convert.gpt_neox import gpt_neox_config
from stateline.models.convert.table import CONVERTERS, read_pretrained, write_pretrained
from stateline.models.convert.weights import Weights
from stateline.models.language_model import LanguageModel

pytestmark = pytest.mark.cpu  # what is tested are files

FOLDERS = {
    "gptneox_hf": "gpt_neox",
    "gptneox_hf_legacy": "gpt_neox",
    "gptneox_hf_seqres": "gpt_neox",
    "mamba_hf": "mamba-hf",
    "mamba2_hf": "mamba-hf",
    "mamba_ssm": "mamba",
    "mamba_ssm_layernorm": "mamba",
}
H3 = {"lm_hybrid": 4, "lm_hybrid_rotary": 3, "lm_pure_hd8": 1}


def new_model(pattern: str = "h3 attention", **settings: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, **{"vocab_size": 11, "d_model": 16, **settings}))


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].equal(tensor), name


@pytest.mark.parametrize(("folder", "name"), FOLDERS.items())
@torch.no_grad()
def test_a_published_folder_is_recognised_and_written_back_tensor_for_tensor(
    vectors: Path, tmp_path: Path, folder: str, name: str
) -> None:
    source = vectors / "repeat" / folder
    found = read_pretrained(source)
    assert found.format == name
    wanted = load_file(source / "vectors.safetensors")
    torch.testing.assert_close(
        found.model(wanted["tokens"]), wanted["logits"], rtol=1e-4, atol=1e-4
    )
    write_pretrained(found.model, tmp_path / "back", name)
    original = Weights(source)
    buffers = {n for n in found.ignored if n != "lm_head.weight"}
    assert_same(Weights(tmp_path / "back"), {n: t for n, t in original.items() if n not in buffers})
    again = read_pretrained(tmp_path / "back")
    assert again.format == name
    assert again.model(wanted["tokens"]).equal(found.model(wanted["tokens"]))


@pytest.mark.parametrize(("case", "heads"), H3.items())
@pytest.mark.parametrize("lightning", [False, True])
@torch.no_grad()
def test_a_file_of_h3_is_read_without_a_configuration_and_written_back(
    vectors: Path, tmp_path: Path, case: str, heads: int, lightning: bool
) -> None:
    tensors = load_file(vectors / "h3" / f"{case}.safetensors")
    weights = {
        n.removeprefix("state_dict."): t for n, t in tensors.items() if n.startswith("state_dict.")
    }
    saved: Any = weights
    if lightning:
        state = {f"model.{name}": tensor for name, tensor in weights.items()}
        saved = {"pytorch-lightning_version": "1.8", "state_dict": state}
    torch.save(saved, tmp_path / "model.pt")
    settings = {"num_heads": heads, "head_order": "pytorch"}
    found = read_pretrained(tmp_path / "model.pt", settings=settings)
    assert found.format == "h3"
    assert (found.model(tensors["input_ids"]) - tensors["logits"]).abs().max() < 1e-4
    in_order = read_pretrained(tmp_path / "model.pt", settings={"num_heads": heads})
    write_pretrained(in_order.model, tmp_path / "back", "h3")
    assert_same(
        Weights(tmp_path / "back" / "model.pt"),
        {"lm_head.weight": weights["backbone.embeddings.word_embeddings.weight"]} | weights,
    )
    again = read_pretrained(tmp_path / "back").model
    assert again(tensors["input_ids"]).equal(in_order.model(tensors["input_ids"]))


def test_h3_with_learned_positions_goes_there_and_back(tmp_path: Path) -> None:
    heads: dict[str, Any] = {"attention": {"n_heads": 2, "bias": True}}
    model = new_model(max_len=9, layers=heads).eval()
    write_pretrained(model, tmp_path / "h3", "h3")
    names = Weights(tmp_path / "h3" / "model.pt")
    assert names["backbone.embeddings.position_embeddings.weight"].shape == (9, 16)
    found = load_pretrained(tmp_path / "h3")
    assert found.max_len == 9
    tokens = torch.arange(9)[None]
    assert found(tokens).equal(model(tokens))


def test_the_heads_of_an_unreleased_h3_must_be_given(tmp_path: Path) -> None:
    model = new_model(layers={"attention": {"n_heads": 2, "bias": True}})
    write_pretrained(model, tmp_path / "h3", "h3")
    with pytest.raises(InputError, match="must have 'num_heads', an integer of at least 1"):
        load_pretrained(tmp_path / "h3" / "model.pt", settings={"num_heads": None})


def test_our_own_folders_are_read_too(tmp_path: Path) -> None:
    model = new_model().eval()
    save_model(model, tmp_path)
    found = read_pretrained(tmp_path, dtype=torch.float64)
    assert (found.format, found.model.embedding.weight.dtype) == ("stateline", torch.float64)


def test_the_precision_can_be_chosen(vectors: Path) -> None:
    model = load_pretrained(vectors / "repeat" / "mamba_hf", dtype=torch.bfloat16)
    dtypes = {name.split(".")[-1]: p.dtype for name, p in model.named_parameters()}
    assert dtypes["a_log"] == torch.float32
    assert model.embedding.weight.dtype == torch.bfloat16
    wide = load_pretrained(vectors / "repeat" / "mamba_hf", dtype=torch.float64)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}


@pytest.mark.usefixtures("unannotated")  # the reader must notice, not the checks of annotations
@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("read", [load_pretrained, load_run])
def test_a_precision_that_is_none_is_refused(
    vectors: Path, tmp_path: Path, dtype: Any, read: Callable[..., Any]
) -> None:
    save_model(new_model(), tmp_path)
    for folder in (tmp_path, vectors / "repeat" / "mamba_hf"):
        with pytest.raises(InputError, match=r"dtype must be one of torch.float16, .* got .*"):
            read(folder, dtype=dtype)


def test_half_precision_is_written_back_as_it_was(tmp_path: Path, vectors: Path) -> None:
    source = vectors / "repeat" / "mamba_hf"
    half = {name: t.bfloat16() for name, t in Weights(source).items()}
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text((source / "config.json").read_text())
    save_file(half, tmp_path / "half" / "model.safetensors")
    write_pretrained(load_pretrained(tmp_path / "half"), tmp_path / "back", "mamba-hf")
    assert_same(Weights(tmp_path / "back"), half)


def test_every_format_that_can_be_written_refuses_another_family(tmp_path: Path) -> None:
    for name, converter in CONVERTERS.items():
        if converter.settings:
            with pytest.raises(InputError, match="got 's4d lstm'"):
                write_pretrained(new_model("s4d lstm"), tmp_path / "out", name)
    with pytest.raises(InputError, match="unknown format to write 'gpt-neox': did you mean 'gpt_n"):
        write_pretrained(new_model(), tmp_path / "out", "gpt-neox")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(InputError, match="exists: choose another folder, or remove it"):
        write_pretrained(new_model(), tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_tokenizer_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "beside" / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        write_pretrained(new_model(), tmp_path / "out", tokenizer_from=tmp_path / "beside")
    assert not (tmp_path / "out").exists()


def test_a_tensor_without_an_official_place_is_refused(tmp_path: Path, vectors: Path) -> None:
    found = load_pretrained(vectors / "repeat" / "mamba_ssm")
    tensors = {**found.state_dict(), "other": torch.ones(1)}
    for name in ("mamba", "mamba-hf"):
        with pytest.raises(InputError, match="have no place for 'other'"):
            CONVERTERS[name].write(tensors, found.config)


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"of no known format \(rwkv\): known are h3, mamba,"):
        load_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"the model in a state dict is of no known .*\(a, b, c\):"
    ):
        load_pretrained({name: torch.ones(2) for name in "abcd"})
    with pytest.raises(InputError, match="no weights in"):
        load_pretrained(tmp_path / "..")
    with pytest.raises(InputError, match=r"no model in .*/nowhere: there is no such folder"):
        load_pretrained(tmp_path / "nowhere")
    with pytest.raises(InputError, match="or get it by hf download tiny/mamba-130m --local-dir"):
        load_pretrained("tiny/mamba-130m")


def test_an_odd_number_of_rotary_entries_is_refused() -> None:
    sizes = {"vocab_size": 5, "hidden_size": 24, "intermediate_size": 12}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(InputError, match="got 3 of 12"):
        gpt_neox_config({**sizes, "rotary_pct": 0.25})
    assert gpt_neox_config({**sizes, "rotary_pct": 0.5}).layers["attention"]["n_heads"] == 2


def test_the_command_converts_there_and_back(
    vectors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = vectors / "repeat" / "mamba_ssm"
    assert main(["convert", str(source), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "recognised mamba: " in said
    assert "not needed: 1 tensors, such as lm_head.weight" in said
    assert load_model(tmp_path / "ours").config.pattern.startswith("mamba*")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "mamba"]) == 0
    assert_same(Weights(tmp_path / "back"), Weights(source))
    assert main(["convert", str(source), str(tmp_path / "back")]) == 2
    assert "exists: choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["run", "run/checkpoints/step-00000002"])
def test_a_checkpoint_keeps_the_tokenizer_of_its_run(tmp_path: Path, given: str) -> None:
    model = LanguageModel(ModelConfig("lstm", vocab_size=8, d_model=4))
    save_model(model, tmp_path / "run" / "checkpoints" / "step-00000002")
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    assert main(["convert", str(tmp_path / given), str(tmp_path / "ours")]) == 0
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"


def test_the_template_of_chats_and_a_tokenizer_of_sentencepiece_go_with_a_model(
    vectors: Path, tmp_path: Path
) -> None:
    names = {"added_tokens.json", "chat_template.jinja", "tokenizer.model"}
    shutil.copytree(vectors / "repeat" / "mamba_hf", tmp_path / "hf")
    for name in names:
        (tmp_path / "hf" / name).write_text(name)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "b"), "--to", "mamba-hf"]) == 0
    assert {name: (tmp_path / "b" / name).read_text() for name in names} == {n: n for n in names}


def test_without_transformers_a_tokenizer_is_copied_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(LanguageModel(ModelConfig("mamba", 256, 16, norm="rms")), tmp_path / "run")
    ByteTokenizer().save(tmp_path / "run" / "tokenizer.json")
    for package in ("transformers", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    convert = ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "mamba-hf"]
    assert main(convert) == 0
    told = capsys.readouterr().out
    assert "and transformers may not read it: pip install 'stateline[hf]'" in told
    assert "copied tokenizer.json\n" in told
    files = [tmp_path / place / "tokenizer.json" for place in ("run", "out")]
    assert files[0].read_text() == files[1].read_text()


MEMORY = """
import os, sys, threading
from stateline import load_pretrained

def private():
    # resident pages that are not mapped from files
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

def watch():
    while not done.wait(0.0005):
        seen.append(private())

load_pretrained(sys.argv[1])
done, seen, before = threading.Event(), [], private()
watcher = threading.Thread(target=watch)
watcher.start()
model = load_pretrained(sys.argv[2])
done.set()
watcher.join()
print(max(seen) - before, private() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("pattern", "settings", "converter"),
    [
        ("mamba*2", {"norm": "rms"}, "mamba-hf"),
        (
            "attention*6",
            {"block": "parallel", "layers": {"attention": {"position": "rope"}}},
            "gpt_neox",
        ),
    ],
)
def test_weights_are_in_memory_once(
    tmp_path: Path, pattern: str, settings: dict[str, Any], converter: str
) -> None:
    """After reading, and at the peak; pages mapped from the file, which can be dropped, aside."""
    for name, d_model in (("small", 8), ("large", 512)):
        config = ModelConfig(pattern, vocab_size=30 * d_model, d_model=d_model, **settings)
        write_pretrained(LanguageModel(config), tmp_path / name, converter)
    size = sum(f.stat().st_size for f in (tmp_path / "large").iterdir())
    run = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    peak, kept = map(int, done.stdout.split())
    assert 0.25 * size < kept < 1.2 * size  # some pages may still be mapped from the file
    assert peak < 1.2 * size
