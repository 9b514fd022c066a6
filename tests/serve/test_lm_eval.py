"""lm-eval scores a served model as one in its own process."""

from pathlib import Path
from typing import Any

import pytest

from stateline.generate import PrefixStates, load_run
from stateline.serve import make_app
from tests.serve.running import running

pytestmark = [pytest.mark.slow, pytest.mark.cpu, pytest.mark.usefixtures("unannotated")]
TEXT = "Hé 😀 naïve 日本語, the theory of the thing\n"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small published model with its tokenizer."""
    transformers, package = map(pytest.importorskip, ("transformers", "tokenizers"))
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    config = transformers.LlamaConfig(
        vocab_size=280,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="e")
    fast.save_pretrained(tmp_path)
    return tmp_path


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    return [instance(kind, {}, one, number) for number, one in enumerate(arguments)]


@pytest.mark.parametrize("batch", [1, 4])
def test_lm_eval_scores_over_http_as_in_process(
    llama: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("lm_eval", "tenacity", "aiohttp"):  # lm_eval[api]
        pytest.importorskip(package)
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    model, tokenizer = load_run(llama)
    pairs = [("the theory", " of the thing"), ("naïve", " 日本語"), ("a b c", " d"), ("", "Hé")]
    texts = [(TEXT * 3,), ("the thing",)]
    untils = [("the theory of", {"until": ["g"], "max_gen_toks": 8})]
    own = HFLM(pretrained=str(llama), device="cpu", batch_size=1)
    with running(make_app(PrefixStates(model), tokenizer, "llama")) as client:
        served = LocalCompletionsAPI(
            base_url=f"{client.url}/completions",
            model="llama",
            tokenizer=str(llama),
            tokenizer_backend="huggingface",
            batch_size=batch,
            max_length=512,
        )
        found, wanted = (
            each.loglikelihood(requests("loglikelihood", pairs)) for each in (served, own)
        )
        rolled, alone = (
            each.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
            for each in (served, own)
        )
        written, own_text = (
            each.generate_until(requests("generate_until", untils)) for each in (served, own)
        )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [value for value, _ in found] == pytest.approx([v for v, _ in wanted], abs=1e-4)
    assert rolled == pytest.approx(alone, abs=1e-3)
    assert written == own_text
