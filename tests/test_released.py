"""Released weights are the same model here and in transformers.

``pytest tests/test_released.py -m "" --log-cli-level=info --models=DIR`` prints what was found. DIR
holds folders of transformers, and NAME-source the GGUF file that they were made from, if any.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.data import Tokenizer
from stateline.evaluate import score_text
from stateline.generate import generate
from stateline.generate.runs import load_run
from stateline.models.convert.table import load_pretrained, read_pretrained, write_pretrained
from stateline.models.language_model import LanguageModel
from tests.models.published import assert_same_tensors

transformers = pytest.importorskip("transformers", reason="what is compared with")

pytestmark = [pytest.mark.slow, pytest.mark.cpu]

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time,")
TEXTS = (
    *PROMPTS,
    "",
    " ",
    "  two  spaces ",
    "a\n\n\nb\r\n\tc",
    "1234567890 3.14 2,000",
    "don't WON'T it's",
    "naïve café Straße",
    "北京 東京 서울",
    "Привет мир",
    "🙂 👩‍👩‍👧 é",
    "<bos> <eos> <|im_start|>user\nhi<|im_end|>",
    "<|endoftext|>next",
    "<start_of_turn>user\nhi<end_of_turn>",
    "x" * 300,
    "!!!???...---___",
    "a\u00a0b\u2003c\u200bd",
    "{'key': [1, 2, {\"x\": null}]}",
    "for i in range(10):\n    print(i)\n",
    "\\frac{a}{b} $x^2$",
    "https://example.com/a?b=c&d=%20#e",
    "AaBbCc camelCase snake_case",
    "\x00\x01\x7f",
)


class Released(NamedTuple):
    folder: Path
    official: Any
    words: Any
    ours: LanguageModel
    tokenizer: Tokenizer

    def text(self, length: int) -> Tensor:
        """The first tokens of a long English text."""
        found = self.words((ROOT / "ARCHITECTURE.md").read_text("utf-8"))["input_ids"]
        return torch.tensor([found[:length]])


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def released(request: pytest.FixtureRequest) -> Released:
    place: Path | None = request.config.getoption("--models")
    if place is None or not (folder := place / request.param).is_dir():
        pytest.skip(f"give a folder that has {request.param} by --models")
    official = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    return Released(folder, official.eval(), words, *load_run(folder))


@torch.no_grad()
def test_logits_agree_cut_anywhere(released: Released) -> None:
    x = released.text(600)
    wanted, found = released.official(x).logits, released.ours(x)
    largest = float(wanted.abs().max())
    start, pieces, state = 0, [], released.ours.init_state(1)
    for length in (1, 250, 7, 330):
        y, state = released.ours.forward_chunk(x[:, start : start + length], state)
        pieces.append(y)
        start += length
    for token in x[:, start:].T:
        y, state = released.ours.step(token, state)
        pieces.append(y[:, None])
    errors = [float((y - wanted).abs().max()) / largest for y in (found, torch.cat(pieces, dim=1))]
    log.info("%s: relative error of logits %.1e, in pieces %.1e", released.folder.name, *errors)
    assert max(errors) < 1e-5
    assert torch.equal(found.argmax(dim=-1), wanted.argmax(dim=-1))


@torch.no_grad()
def test_losses_agree(released: Released) -> None:
    x = released.text(400)
    wanted = F.cross_entropy(released.official(x).logits[0, :-1].double(), x[0, 1:])
    found = score_text(released.ours, [x[0]]).losses.mean
    log.info("%s: loss %.9f, of transformers %.9f", released.folder.name, found, wanted)
    assert found == pytest.approx(float(wanted), rel=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_texts_are_equal(prompt: str, released: Released) -> None:
    x = torch.from_numpy(released.tokenizer.encode(prompt))[None]
    mask = torch.ones_like(x)
    wanted = released.official.generate(x, attention_mask=mask, do_sample=False, max_new_tokens=60)
    same = wanted[0, x.shape[1] :].tolist()  # transformers stops at a token that ends texts
    assert generate(released.ours, x, len(same))[0].tolist() == same
    log.info("%s: %d tokens equal after %r", released.folder.name, len(same), prompt)


def test_the_tokenizers_are_the_same(released: Released) -> None:
    ours, words, different = released.tokenizer, released.words, []
    for text in TEXTS:
        ids, prompt = words(text, add_special_tokens=False)["input_ids"], words(text)["input_ids"]
        if prompt[:2] == [words.bos_token_id] * 2 and text.startswith(words.bos_token):
            prompt = prompt[1:]  # a text that has the token at its beginning needs no other
        read = ours.encode(text).tolist(), ours.prompt(text).tolist(), ours.decode(prompt)
        if read != (ids, prompt, words.decode(prompt)):
            different.append(text)
    log.info("%s: %d texts, different: %d", released.folder.name, len(TEXTS), len(different))
    assert not different


def test_the_way_back_keeps_every_tensor(released: Released, tmp_path: Path) -> None:
    found = read_pretrained(released.folder)
    write_pretrained(found.model, tmp_path / "back", found.format, tokens=found.tokens)
    assert_same_tensors(tmp_path / "back", released.folder)
    again = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    for name in ("max_position_embeddings", "eos_token_id", "rms_norm_eps", "layer_types"):
        assert getattr(again, name, None) == getattr(released.official.config, name, None), name


def test_the_gguf_file_is_the_same_model(released: Released) -> None:
    pytest.importorskip("gguf", reason="reads the file")
    source = released.folder.with_name(f"{released.folder.name}-source")
    files = sorted(source.rglob("*.gguf"))
    if not files:
        pytest.skip(f"{source} has no GGUF file")
    found = load_pretrained(files[0]).state_dict()
    wanted = released.ours.state_dict()
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]
