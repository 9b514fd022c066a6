"""``generate --chat`` writes messages by the model's template, and continues kept chats."""

import json
from pathlib import Path

import pytest
import torch

from stateline.cli import main
from stateline.data import load_tokenizer
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

pytestmark = pytest.mark.cpu
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A model of bytes that ends its turn after a while."""
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=256, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([], trainer)
    made.add_special_tokens(["<end>"])
    torch.manual_seed(0)
    config = ModelConfig("lstm", 257, 16, tie_embeddings=False, head_bias=True)
    model = LanguageModel(config)
    assert model.head is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    save_model(model.eval(), tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert load_tokenizer(tmp_path).chat_template == TEMPLATE
    return tmp_path


def generated(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["generate", str(run), "--temperature", "0", *options]) == 0
    return capsys.readouterr().out


def test_a_message_is_written_by_the_template(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "--max_new_tokens", "12"
    found = generated(run, capsys, "--chat", "--system", "Be brief.", "--prompt", "Hi", *few)
    text = "[system]Be brief.<end>\n[user]Hi<end>\n[assistant]"
    assert text + found == generated(run, capsys, "--prompt", text, *few)
    (run / "prompts").write_text("Hi\nyou")
    lines = generated(run, capsys, "--chat", "--prompts", str(run / "prompts"), *few).splitlines()
    alone = [generated(run, capsys, "--chat", "--prompt", p, *few)[:-1] for p in ("Hi", "you")]
    assert [json.loads(line)["text"] for line in lines] == alone


def test_a_kept_chat_goes_on_as_the_whole_chat(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = "--save_state", str(run / "chat.safetensors")
    few = "--max_new_tokens", "4"
    said = generated(run, capsys, "--chat", "--prompt", "Hi", *few, *state)
    kept = "--state", state[1]
    found = generated(run, capsys, "--chat", "--prompt", "And?", *few, *kept)
    text = "<end>\n[user]And?<end>\n[assistant]"
    plain = generated(run, capsys, "--prompt", text, *few, *kept)
    assert plain.removeprefix(text) == found
    assert said


def test_special_tokens_are_shown_if_asked_for(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(run)
    assert model.head is not None
    with torch.no_grad():
        model.head.bias[256] += 1e3
    save_model(model, run)
    options = "--prompt", "a", "--max_new_tokens", "2"
    assert generated(run, capsys, *options) == "a\n"
    assert generated(run, capsys, *options, "--special_tokens") == "a<end><end>\n"
    chat = "--chat", *options, "--special_tokens"  # here the token ends a turn
    assert generated(run, capsys, *chat) == "\n"
    assert generated(run, capsys, *chat, "--ignore_eos") == "<end><end>\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat"], "--chat needs the message"),
        (["--chat", "--stream"], "--chat needs the message"),
        (["--system", "a", "--prompt", "b"], "--system begins a chat"),
    ],
)
def test_options_of_chats_that_do_not_fit_are_refused(
    run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_model_of_chats_warns_about_plain_text(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    generated(run, capsys, "--prompt", "a", "--max_new_tokens", "1")
    assert "give --chat" in caplog.text
    caplog.clear()
    generated(run, capsys, "--chat", "--prompt", "a", "--max_new_tokens", "1")
    assert not caplog.text
