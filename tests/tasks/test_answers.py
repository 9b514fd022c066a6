"""Prompts and answers: packed, with losses on the answers alone."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stateline.data.examples import AnswerText, ExampleReader
from stateline.data.token_text import TokenText
from stateline.errors import InputError
from stateline.evaluate import evaluate, evaluate_by_position
from stateline.generate import generate
from stateline.models.factory import make_model
from stateline.models.language_model import LanguageModel
from stateline.models.presets import configure
from stateline.runs.score import sample_text
from stateline.tasks import IGNORE, Answers, PackedBatch, make_task
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from tests.tasks.small_data import answers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return answers(tmp_path)


def task_of(path: Path, **changes: Any) -> Answers:
    settings = {"length": 64, "batch_size": 4, "answered": 0, **changes}
    return Answers(path=str(path), **settings)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def untrained(pattern: str = "gated_delta_net attention(position=rope)") -> LanguageModel:
    torch.manual_seed(0)
    model = make_model(configure(pattern, vocab_size=256, d_model=8))
    assert isinstance(model, LanguageModel)
    return model


def examples_of(tokens: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[str, str]]:
    """The texts of a row, cut behind every newline, and of each what its targets say."""
    ends = [0, *(np.flatnonzero(targets == 10) + 1).tolist()]
    for a, b in pairwise(ends):
        scored = targets[a:b][targets[a:b] != IGNORE]
        yield bytes(tokens[a:b].tolist()).decode(), bytes(scored.tolist()).decode()


@pytest.mark.parametrize("documents", ["pack", "separate"])
def test_an_epoch_reads_every_training_example_once_and_its_answer_alone_is_scored(
    path: Path, documents: Any
) -> None:
    task = task_of(path, documents=documents, batch_size=1)
    facts, read = task.describe(), list[str]()
    count = len(task._rows) if documents == "pack" else facts["training_examples"]
    for index in range(int(str(count))):
        batch = task.train_batch(index)
        for text, scored in examples_of(batch.tokens[0], batch.targets[0]):
            prompt, equals, answer = text.partition("= ")
            assert scored == f"{answer}\n"
            read.append(prompt + equals + answer)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    sums = {line["prompt"] + line["answer"] for line in lines}
    held_out = {
        f"{own.prompt}{bytes_of(own.tokens[own.answer : -1]).decode()}" for own in _scored(task)
    }
    assert len(read) == len(set(read)) == facts["training_examples"]
    assert set(read) | held_out == sums
    assert not set(read) & held_out


def _scored(task: Answers) -> list[Any]:
    return task._texts[1].examples


def bytes_of(tokens: np.ndarray) -> bytes:
    return bytes(tokens.tolist())


def gradient(model: LanguageModel, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def differs(task: Answers, change: Callable[[PackedBatch], PackedBatch] = lambda own: own) -> float:
    """Largest difference of a packed gradient from the sum of the single examples' gradients."""
    model, batch = untrained().double(), task.train_batch(0)
    assert isinstance(batch, PackedBatch)
    alone, losses = task_of(Path(task.path), documents="separate"), list[torch.Tensor]()
    for row in zip(batch.tokens, batch.targets, strict=True):
        for text, _ in examples_of(*row):
            prompt = text.partition("= ")[0] + "= "
            whole = torch.tensor([list(f"{text}\n".encode())])
            targets = whole[:, 1:].clone()
            targets[:, : len(prompt) - 1] = IGNORE
            losses.append(alone.loss(model(whole[:, :-1]), targets))
    expected = gradient(model, torch.stack(losses).sum())
    tokens, targets, starts = change(batch)
    packed = gradient(model, task.loss(model(tokens, starts=starts), targets))
    return float((packed - expected).abs().max() / expected.abs().max())


def test_the_gradient_of_a_packed_batch_is_the_sum_of_those_of_its_examples(path: Path) -> None:
    assert differs(task_of(path)) < 1e-12


def test_an_example_that_reads_its_neighbour_is_found(path: Path) -> None:
    def leak(batch: PackedBatch) -> PackedBatch:
        starts = batch.starts.clone()
        starts[0, starts[0].nonzero()[1]] = False
        return batch._replace(starts=starts)

    assert differs(task_of(path), leak) > 1e-3


def test_a_loss_on_a_prompt_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerText, "asked", TokenText.asked)
    assert differs(task_of(path)) > 1e-3


@pytest.mark.parametrize("documents", ["pack", "separate"])
def test_packed_and_separate_examples_have_one_score(path: Path, documents: Any) -> None:
    task, model = task_of(path, documents=documents), untrained().double()
    scores = evaluate(model, task, 64, batches=0)
    losses = list[torch.Tensor]()
    for own in _scored(task):
        whole = torch.from_numpy(own.tokens).long()[None]
        logits = model(whole[:, :-1])[0, own.answer - 1 :].detach()
        losses += torch.nn.functional.cross_entropy(
            logits, whole[0, own.answer :], reduction="none"
        ).split(1)
    assert scores["answer_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-9)
    assert scores.keys() == task.score_names()
    assert max(evaluate_by_position(model, task, 64, batches=0)) <= 64


def test_a_prompt_begins_as_in_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateline.data.ByteTokenizer.beginning", (1,))
    path = write(tmp_path / "one.jsonl", {"prompt": "ab", "answer": "c"})
    (example,) = ExampleReader("byte", prompt="prompt", answer="answer").read(str(path))
    assert (example.tokens.tolist(), example.answer) == ([1, *b"abc\n"], 3)


def test_answers_that_greedy_decoding_gives_exactly_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": "yes" if n * n % 11 == 5 else "no"} for n in range(90)]
    task = task_of(write(tmp_path / "same.jsonl", *rows), answered=9, held_out=0.3)
    torch.manual_seed(0)
    model = make_model(configure("lstm", vocab_size=256, d_model=16))
    assert isinstance(model, LanguageModel)
    train(model, task, TrainConfig(steps=40, lr=3e-2, warmup_steps=0, schedule="constant"))
    right = list[bool]()
    for own in task.questions():
        prompt, wanted = (
            torch.from_numpy(own.tokens).long().split([own.answer, len(own.tokens) - own.answer])
        )
        right.append(generate(model, prompt[None], len(wanted))[0].equal(wanted))
    assert 0 < sum(right) < 9
    assert evaluate(model, task, 64, batches=0)["exact_match"] == pytest.approx(sum(right) / 9)
    assert str(sample_text(model, task)).startswith(task.questions()[0].prompt)


def test_a_sample_leaves_out_tokens_that_the_task_lacks(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": "no"} for n in range(90)]
    task = task_of(write(tmp_path / "same.jsonl", *rows), answered=9, held_out=0.3)
    model = make_model(configure("lstm", vocab_size=2560, d_model=16)).eval()
    assert str(sample_text(model, task)).startswith(task.questions()[0].prompt)


SHORT = TrainConfig(steps=4, lr=1e-2, schedule="constant", warmup_steps=0)


@pytest.mark.parametrize(
    ("documents", "change"),
    [
        ("pack", {}),
        ("separate", {"checkpoint_activations": True}),
        ("pack", {"carry_state": True, "carry_cap": 256}),
        ("separate", {"carry_state": True, "carry_cap": 96, "segment_len": 32}),
    ],
    ids=str,
)
def test_training_on_answers_resumes_to_the_bit(
    path: Path, tmp_path: Path, documents: Any, change: dict[str, Any]
) -> None:
    weights = []
    for stops in ((4,), (2, 4)):
        model = untrained("h3 attention")
        for steps in stops:
            config = replace(SHORT, steps=steps, **change)
            train(model, task_of(path, documents=documents), config, folder=tmp_path / str(stops))
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("prompts", [2, 3, 20])
def test_equal_prompts_are_on_one_side(tmp_path: Path, prompts: int) -> None:
    rows = [{"prompt": f"{n % prompts}?", "answer": str(n)} for n in range(200)]
    task = task_of(write(tmp_path / "twice.jsonl", *rows), held_out=0.3)
    sides = [{own.prompt for own in text.examples} for text in task._texts]
    assert all(sides)
    assert sum(map(len, sides)) == prompts


def test_settings_are_chosen_on_prompts_that_are_not_trained_on(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n % 40}?", "answer": str(n)} for n in range(200)]
    task = task_of(write(tmp_path / "five.jsonl", *rows))
    before = [bytes_of(own.tokens) for own in task._texts[0].examples]
    said = task.hold_out_validation()
    training, held_out = ([own.prompt for own in text.examples] for text in task._texts)
    assert held_out
    assert not set(training) & set(held_out)
    assert said.startswith(f"{len(held_out)} of {len(before)} training examples")
    now = [bytes_of(own.tokens) for text in task._texts for own in text.examples]
    assert sorted(now) == sorted(before)


def test_prompts_that_are_all_equal_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "answer": str(n)} for n in range(9)]
    path = write(tmp_path / "one.jsonl", *rows)
    with pytest.raises(InputError, match=r"2 different prompts of .*one.jsonl, got 1 in 9: add"):
        task_of(path)


def test_fields_have_the_names_that_are_given(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "reply": "yes"} for n in range(9)]
    spec = (
        f'answers(path="{write(tmp_path / "named.jsonl", *rows)}", prompt=question, answer=reply)'
    )
    task = make_task(spec)
    assert isinstance(task, Answers)
    assert bytes_of(task.questions()[0].tokens)[1:] == b"?yes\n"


def test_an_example_that_does_not_fit_is_refused_left_out_or_cut(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * n, "answer": "bc"} for n in range(1, 13)]
    path = write(tmp_path / "long.jsonl", *rows)
    with pytest.raises(
        InputError, match="4 of 12 examples do not fit into rows of length=10, the longest needs 14"
    ):
        task_of(path, length=10)
    for too_long, longest, left_out in (("drop", 11, 4), ("cut", 11, 2)):
        task = task_of(path, length=10, too_long=too_long)
        own = [example for text in task._texts for example in text.examples]
        assert max(len(example.tokens) for example in own) == longest
        assert all(example.answer < len(example.tokens) for example in own)
        assert task.describe()["left_out_examples"] == left_out == 12 - len(own)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": "a"},
            "line 2, must have text in the field 'answer', but it has 'prompt': name",
        ),
        ({"prompt": 1, "answer": "b"}, "text in the field 'prompt', but it has 1 there"),
        ({"prompt": "a", "answer": " "}, "line 2, has an empty answer: fill it"),
        ({"prompt": "", "answer": "b"}, "line 2, has an empty prompt: fill it"),
        (["a", "b"], "it has no fields"),
        ({"messages": []}, "line 2, must be a chat that the template of byte can write"),
    ],
    ids=str,
)
def test_a_line_that_is_no_example_is_named(tmp_path: Path, line: Any, message: str) -> None:
    good = {"prompt": "a", "answer": "b"}
    with pytest.raises(InputError, match=message):
        task_of(write(tmp_path / "bad.jsonl", good, line, good))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ""}, "needs a file of examples"),
        ({"held_out": 1.0}, "wants held_out to be"),
        ({"batch_size": 99, "documents": "separate"}, "at least batch_size=99 examples"),
        ({"batch_size": 99}, "batch_size=99"),
        ({"length": 0}, "wants length to be"),
        ({"answered": -1}, "wants answered to be"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(path: Path, change: dict[str, Any], message: str) -> None:
    settings = {"path": str(path), "length": 64, **change}
    with pytest.raises(InputError, match=message):
        Answers(**settings).train_batch(0)
    with pytest.raises(InputError, match="length must be at least 64"):
        task_of(path).held_out(63)


def test_two_examples_are_too_few(tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": "b"}
    with pytest.raises(InputError, match="at least 3 examples, got 2"):
        task_of(write(tmp_path / "few.jsonl", row, row))


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Path:
    """A folder of a tokenizer of bytes with a chat template."""
    pytest.importorskip("transformers")
    from stateline import hf
    from stateline.data import ByteTokenizer

    made = hf.tokenizer(ByteTokenizer())
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def test_a_chat_is_written_by_the_template_and_its_last_message_is_the_answer(
    chat_tokenizer: Path, tmp_path: Path
) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "sure?"},
                {"role": "assistant", "content": "no"},
            ]
        }
        for n in range(9)
    ]
    path = write(tmp_path / "chats.jsonl", *rows)
    first = task_of(path, length=128, tokenizer=str(chat_tokenizer), answered=1).questions()[0]
    text = bytes_of(first.tokens).decode()
    assert text[: first.answer] == first.prompt
    assert first.prompt.endswith("?</s>\n<assistant>yes</s>\n<user>sure?</s>\n<assistant>")
    assert text[first.answer :] == "no</s>\n"
    rows[4]["messages"].pop()
    with pytest.raises(InputError, match=r"line 5, must be a chat .* has the role 'user'"):
        task_of(write(path, *rows), tokenizer=str(chat_tokenizer))
    with pytest.raises(InputError, match="has no template of chats"):
        task_of(write(path, *rows[:4]))
