"""The requests and scores of tasks are those of lm-eval's own runner with its class HFLM."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stateline.data import load_tokenizer
from stateline.errors import InputError
from stateline.evaluate.harness import Chat, run_suite
from stateline.generate import load_run

pytestmark = [pytest.mark.slow, pytest.mark.cpu, pytest.mark.usefixtures("unannotated")]

TEXT = "Hé 😀 naïve 日本語, the theory of the thing\nis that a state is a value; so it is.\n"
LIMIT = 48
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"

TASKS = {
    "choice": """
output_type: multiple_choice
description: "Answer.\\n"
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]
""",
    "last": """
output_type: loglikelihood
doc_to_text: "{{q}} "
doc_to_target: "{{a}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "page": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "write": """
output_type: generate_until
num_fewshot: 2
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n", "th"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "begun": """
output_type: generate_until
num_fewshot: 0
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
gen_prefix: "It is "
generation_kwargs: {until: [], max_gen_toks: 5, min_new_tokens: 3}
metric_list: [{metric: exact_match}]
""",
}


def tokenizer(folder: Path, begin: bool) -> Any:
    """A byte-level tokenizer, which may put a token before each text."""
    transformers, package = map(pytest.importorskip, ("transformers", "tokenizers"))
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    made.add_special_tokens(["<s>", "</s>"])
    if begin:
        made.post_processor = package.processors.TemplateProcessing(
            single=["<s>", "$A"], special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>"} if begin else {"eos_token": "</s>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    fast.chat_template = TEMPLATE if begin else NO_SYSTEM + TEMPLATE.replace("{{ bos_token }}", "")
    fast.save_pretrained(folder)
    return fast


def rotary(transformers: Any, size: int, end: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LIMIT,
        initializer_range=0.3,
        bos_token_id=end - 1,
        eos_token_id=end,
    )
    return transformers.LlamaForCausalLM(config)


def learned(transformers: Any, size: int, end: int) -> Any:
    config = transformers.GPT2Config(
        vocab_size=size,
        n_positions=LIMIT,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        bos_token_id=end,
        eos_token_id=end,
    )
    return transformers.GPT2LMHeadModel(config)


def recurrent(transformers: Any, size: int, end: int) -> Any:
    config = transformers.MambaConfig(
        vocab_size=size,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        initializer_range=0.3,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    return transformers.MambaForCausalLM(config)


MODELS: dict[str, tuple[Callable[..., Any], bool]] = {
    "rotary": (rotary, True),
    "learned": (learned, False),
    "recurrent": (recurrent, False),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small published model; its name is that of its kind."""
    transformers = pytest.importorskip("transformers")
    make, begin = MODELS[request.param]
    path = tmp_path_factory.mktemp("models") / request.param
    fast = tokenizer(path, begin)
    transformers.set_seed(0)
    make(transformers, len(fast), fast.eos_token_id).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks with their data."""
    home = tmp_path_factory.mktemp("tasks")
    words = TEXT.split()
    for split, size in (("train", 9), ("test", 5)):
        rows = [
            {
                "q": " ".join(words[n % 7 :] * (n % 4 + 1)) + f" {split} {n}:",
                "a": words[n],
                "choices": [f"{words[n]} it", words[n + 1], "so"],
                "label": n % 3,
                "page": TEXT[n:] * (n + 1) if n else "",
            }
            for n in range(size)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (home / f"{split}.jsonl").write_text(text)
    files = {split: str(home / f"{split}.jsonl") for split in ("train", "test")}
    for name, about in TASKS.items():
        (home / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {json.dumps(files)}}}"
            f"\ntraining_split: train\ntest_split: test\nfewshot_split: train\n{about}"
        )
    return home


Asked = dict[str, list[tuple[tuple[Any, ...], Any]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[type, Asked]:
    """All requests with their answers, by the class that was asked."""
    from lm_eval.models.huggingface import HFLM

    from stateline.evaluate.harness.model import StatelineLM

    found: dict[type, Asked] = {HFLM: {}, StatelineLM: {}}

    def note(kind: type, name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def noted(self: Any, requests: Sequence[Any], **more: Any) -> Any:
            answers = method(self, requests, **more)
            pairs = zip((request.args for request in requests), answers, strict=True)
            found[kind].setdefault(name, []).extend(pairs)
            return answers

        return noted

    for kind in found:
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            monkeypatch.setattr(kind, name, note(kind, name))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # takes seconds
    return found


def theirs(folder: Path, tasks: Path, max_length: int | None, **more: Any) -> dict[str, float]:
    """Scores by lm-eval's own runner."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=HFLM(str(folder), device="cpu", batch_size=2, max_length=max_length),
        tasks=[*TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **more,
    )
    return {
        f"{task} {key.removesuffix(',none')}": value
        for task, values in found["results"].items()
        for key, value in values.items()
        if key.endswith(",none") and "stderr" not in key
    }


CASES: list[tuple[int | None, Chat | None, int | None]] = [
    (None, None, None),
    (0, None, None),
    (3, None, 40),
    (2, Chat(), None),
    (3, Chat(turns=False, system="Be brief."), 60),
]


@pytest.mark.parametrize(("shots", "chat", "window"), CASES)
def test_requests_and_scores_are_those_of_lm_evals_runner(
    folder: Path,
    tasks: Path,
    asked: dict[type, Asked],
    shots: int | None,
    chat: Chat | None,
    window: int | None,
) -> None:
    window = min(window, LIMIT) if window and folder.name == "learned" else window
    if window is None and folder.name == "recurrent":
        window = 2048  # what HFLM takes for a model without a limit
    how = {"apply_chat_template": chat is not None, "num_fewshot": shots}
    how |= {"system_instruction": chat.system, "fewshot_as_multiturn": chat.turns} if chat else {}
    wanted = theirs(folder, tasks, window, **how)
    model, text = load_run(folder)
    found = run_suite(
        model, text, [*TASKS], tasks_path=tasks, shots=shots, max_length=window, chat=chat, rows=3
    )
    official, own = asked.values()
    assert {*official} == {*own} == {"loglikelihood", "loglikelihood_rolling", "generate_until"}
    for kind, pairs in official.items():
        assert [given for given, _ in own[kind]] == [given for given, _ in pairs]
        for (given, answer), (_, ours) in zip(pairs, own[kind], strict=True):
            if kind == "generate_until":
                assert ours == answer, given
            elif kind == "loglikelihood":
                assert ours == (pytest.approx(answer[0], abs=1e-4), answer[1]), given
            else:
                assert ours == pytest.approx(answer, abs=1e-4), given
    assert {f"{one.task} {one.name}" for one in found} == {*wanted}
    for one in found:
        assert one.value == pytest.approx(wanted[f"{one.task} {one.name}"], rel=1e-4), one


def test_a_chat_goes_on_after_what_was_said_last(folder: Path) -> None:
    from stateline.evaluate.harness.model import StatelineLM

    model, text = load_run(folder)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]
    transformers = pytest.importorskip("transformers")
    official = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = official.apply_chat_template(said, tokenize=False, continue_final_message=True)
    found = StatelineLM(model, text).apply_chat_template(said, add_generation_prompt=False)
    assert found == wanted
    if folder.name != "rotary":  # its template takes no message of the system
        found = StatelineLM(model, text).apply_chat_template(
            [{"role": "system", "content": ""}, said[0]]
        )
        assert found == official.apply_chat_template(
            said[:1], tokenize=False, add_generation_prompt=True
        )


def test_settings_of_written_texts_that_are_not_supported_are_refused(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    from stateline.evaluate.harness.model import StatelineLM

    model, _ = load_run(folder)
    lm = StatelineLM(model, load_tokenizer(folder))
    for name, value in (("repetition_penalty", 1.5), ("num_beams", 4)):
        request = Instance("generate_until", {}, ("a", {"until": ["b"], name: value}), 0)
        with pytest.raises(InputError, match=f"generation_kwargs has {name}={value}"):
            lm.generate_until([request])
    if folder.name == "learned":
        with pytest.raises(InputError, match="made for 48 tokens, got max_length=49"):
            StatelineLM(model, lm.text, max_length=49)
