"""What a model loses without a head: equal to the model with that head's outputs removed."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.cli import main
from stateline.data import ByteTokenizer
from stateline.errors import InputError
from stateline.layers import Attention, SlidingAttention
from stateline.layers.mixers.heads import Rope
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.constructions import ngram_copier
from stateline.models.language_model import LanguageModel
from stateline.probe import Material, Reader, StatelineReader, load_reader, make_examples
from stateline.probe.ablations import FILE, Ablation, read_heads
from stateline.probe.heads import Question, answered, probe_heads
from stateline.tasks.base import IGNORE

ASKED = Question("dictionary", 2, examples=3, rows=2)
PATTERNS = {
    "attention lstm gated_delta_net(n_heads=2)": {},
    "attention(n_heads=2) s4d": {"block": "parallel"},
    "parallel(attention(n_heads=2, d_head=4), mamba2(expand=1, d_head=8)) mlstm": {},
    "sliding_attention(window=9) attention": {"norm_after": "attention"},
}


def reader(pattern: str, **settings: object) -> StatelineReader:
    torch.manual_seed(0)
    config = ModelConfig(pattern, vocab_size=256, d_model=16, **settings)
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) / 10)
    return StatelineReader("made", model, ByteTokenizer())


def measured(source: Reader, folder: Path, asked: Question = ASKED) -> Ablation:
    folder.mkdir(exist_ok=True)
    spec = str(folder / "model")
    if not Path(spec).exists():
        save_model(LanguageModel(ModelConfig("lstm", 4, d_model=4)), Path(spec))
    (found,) = probe_heads(spec, [asked], Material(None), lambda _: source, folder).found
    return found


def scores(source: StatelineReader) -> tuple[float, float]:
    """Share of exact answers, and loss of an answer, read from the logits."""
    tokens, targets = answered(source, ASKED, Material(None))
    with torch.inference_mode():
        losses = source.model(tokens).log_softmax(-1)
    asked, wanted = targets != IGNORE, targets.clamp(min=0)[..., None]
    nats = -(losses.gather(2, wanted)[..., 0] * asked).sum(1).mean()
    right = ((losses.argmax(-1) == targets) | ~asked).all(1).float().mean()
    return right.item(), nats.item()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_silent_head_is_a_head_whose_outputs_are_not_read(pattern: str, tmp_path: Path) -> None:
    source = reader(pattern, **PATTERNS[pattern])
    found = measured(source, tmp_path)
    right, whole = scores(source)
    assert (found.match, found.nats) == (right, pytest.approx(whole, rel=1e-5))
    mixers = [heads for heads in source.network().mixers if heads]
    for loss in found.losses:
        heads, number = iter(mixers[loss.layer]), loss.head
        group = next(heads)
        while number >= group.number:
            number, group = number - group.number, next(heads)
        weight = group.last.weight
        kept, columns = (
            weight.detach().clone(),
            slice(number * group.width, (number + 1) * group.width),
        )
        with torch.no_grad():
            weight[:, columns] = 0
            assert loss.nats == pytest.approx(scores(source)[1] - whole, abs=2e-5)
            weight.copy_(kept)
    assert len(found.losses) == sum(group.number for heads in mixers for group in heads)


def test_a_model_that_answers_nothing_right_is_told_that_its_ranking_says_little(
    tmp_path: Path,
) -> None:
    source, spec = reader("attention"), str(tmp_path / "model")
    save_model(LanguageModel(ModelConfig("lstm", 4, d_model=4)), Path(spec))
    told: list[str] = []
    probe_heads(spec, [ASKED], Material(None), lambda _: source, tmp_path, tell=told.append)
    assert scores(source)[0] == 0
    assert "answers 0% of the examples: a ranking of its heads by what it loses says" in told[-1]


def test_a_whole_layer_is_silent_without_all_of_its_heads(tmp_path: Path) -> None:
    source = reader("attention mlstm h3")
    found = measured(source, tmp_path, ASKED._replace(unit="layers"))
    assert [(loss.layer, loss.head) for loss in found.losses] == [(0, -1), (1, -1), (2, -1)]
    last = source.model.stack.links[0].layer.out_proj
    whole = scores(source)[1]
    torch.nn.init.zeros_(last.weight)
    assert found.losses[0].nats == pytest.approx(scores(source)[1] - whole, abs=2e-5)


def test_a_head_that_averages_some_tokens_needs_to_see_as_many(tmp_path: Path) -> None:
    """Head s of the first layer of Theorem 2.3 averages s + 1 tokens, the second looks back 13."""
    source = StatelineReader("made", ngram_copier(3).eval(), ByteTokenizer())
    task, windows = "copying(max_len=12)", (1, 2, 3, 4, 32)
    asked = Question(task, 12, "windows", examples=8, rows=4, windows=windows)
    needs = {
        need.losses[0].head + 10 * need.losses[0].layer: need.window
        for need in measured(source, tmp_path, asked).needs()
    }
    assert needs == {0: 1, 1: 2, 2: 3, 3: 4, 10: 32}


@pytest.mark.parametrize(
    "settings", [{"position": Rope()}, {"position": "relative"}, {"qk_norm": True}]
)
def test_attention_within_a_window_is_sliding_attention(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, near = (SlidingAttention(16, window=n, **settings) for n in (9, 3))
    weights = layer.state_dict()
    if "position_keys" in weights:
        weights["position_keys"] = weights["position_keys"][:3]
    near.load_state_dict(weights)
    x = torch.randn(2, 12, 16)
    torch.testing.assert_close(layer.within(3)(x), near(x))
    assert layer.window == 9
    assert SlidingAttention(16, window=4, blocks=True).within(3) is None
    if isinstance(settings.get("position"), Rope):
        whole = Attention(16, **settings)
        whole.qkv.weight.data.copy_(torch.cat([near.q_proj.weight, near.kv_proj.weight]))
        whole.out_proj.load_state_dict(near.out_proj.state_dict())
        torch.testing.assert_close(whole.within(3)(x), near(x))


def test_heads_without_windows_are_left_out(tmp_path: Path) -> None:
    asked = ASKED._replace(unit="windows", windows=(2, 99))
    found = measured(reader("s4d sliding_attention lstm"), tmp_path, asked)
    assert {(loss.layer, loss.window) for loss in found.losses} == {(1, 2), (1, 99)}
    wide = [loss.nats for loss in found.losses if loss.window == 99]
    assert wide == pytest.approx([0.0] * len(wide), abs=1e-5)
    with pytest.raises(InputError, match="windows are those of attention"):
        measured(reader("s4d"), tmp_path / "none", asked)


def test_a_probe_that_was_stopped_goes_on_after_the_last_whole_layer(tmp_path: Path) -> None:
    source = reader("attention*3")
    whole = measured(source, tmp_path)
    path = tmp_path / FILE
    values = json.loads(path.read_text())
    kept = [loss for loss in values["found"][0]["losses"] if loss["layer"] == 0]
    kept[0]["nats"] = 7.0  # a sign that it is not measured again
    values["found"][0]["losses"] = kept
    path.write_text(json.dumps(values))
    again = measured(source, tmp_path)
    assert again.losses[0].nats == 7.0
    assert again.losses[4:] == whole.losses[4:]

    def unread(_: str) -> Reader:
        raise AssertionError

    spec = str(tmp_path / "model")
    (known,) = probe_heads(spec, [ASKED], Material(None), unread, tmp_path).found
    assert known == again
    with pytest.raises(AssertionError):  # in another precision it is read, and measured again
        probe_heads(spec, [ASKED], Material(None), unread, tmp_path, settings=("bfloat16",))
    path.write_text("{")
    with pytest.raises(InputError, match="damaged"):
        read_heads(tmp_path)


@pytest.mark.cpu
def test_heads_of_a_published_model_are_the_same_through_transformers(
    tiny: Path, tmp_path: Path
) -> None:
    folder = str(tiny / "pythia")
    found = [
        measured(load_reader(spec, dtype=torch.float32), tmp_path / name)
        for name, spec in (("ours", folder), ("theirs", f"hf:{folder}"))
    ]
    ours, theirs = (torch.tensor([loss.nats for loss in one.losses]) for one in found)
    assert len(ours) == 8
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_dictionary_asks_for_one_of_its_values() -> None:
    draw = partial(make_examples, material=Material(None), encode=list, decode=str)
    (one,) = draw("dictionary", 100, 1)
    first, *lines, question = one.prompt.split("\n")
    entries = dict(line.split(":") for line in lines)
    assert first == "Memorize the following dictionary:"
    assert len({*entries}) == len({*entries.values()}) == 100
    assert f"The value of the key '{question.split(chr(39))[1]}' is" == question
    assert one.accepted == (entries[question.split("'")[1]],)


def test_heads_are_probed_from_the_command_line_also_on_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = LanguageModel(ModelConfig("attention(n_heads=2)*2", vocab_size=70, d_model=16))
    save_model(model, tmp_path / "model")
    command = ["probe", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--examples", "4"]
    task = ["--tasks", "copying(max_len=5)", "associative_recall", "--device", "cpu"]
    assert main([*command, "--heads", *task]) == 0
    shown = capsys.readouterr().out
    assert "layer 2 of 2" in shown
    assert shown.count("exact match falls by") == 2
    page = (tmp_path / "out" / "heads.html").read_text()
    assert page.count('data-chart="heads-') == 2
    assert main([*command, "--heads", "--windows", "9", "2", "--tasks", "associative_recall"]) == 0
    assert capsys.readouterr().out.count("measured before") == 1
    assert "needs to see" in (tmp_path / "out" / "heads.html").read_text()
    assert main([*command, "--layers", "--windows", "2"]) == 2
    assert "give --windows with --heads" in capsys.readouterr().err
    assert main([*command, "--layers", "--tasks", "text"]) == 2
    assert "no right answers: take a task such as copying" in capsys.readouterr().err
    assert main([*command, "--layers", "--heads"]) == 2
    assert "either --heads or --layers" in capsys.readouterr().err
