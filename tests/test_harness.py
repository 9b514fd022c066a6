"""Evaluation suites: the scores are those of a plain loop, and of lm-eval's own model class."""

import importlib
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stateline.cli import main
from stateline.data import ByteTokenizer, CharacterTokenizer
from stateline.errors import InputError
from stateline.evaluate.harness import LOCAL_TASKS, Metric, run_suite, tasks
from stateline.generate import generate
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.likelihood import token_losses

slow = pytest.mark.slow  # importing lm-eval takes seconds
pytestmark = [pytest.mark.usefixtures("unannotated"), pytest.mark.filterwarnings("default")]

ENTITIES = {
    "text": "Ann met Bob in Rome.\n@highlight\nAnn left.",
    "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}],
}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "BoolQ": [
        {"question": "is a state a value", "passage": "A state is a value.", "label": True},
        {"question": "is it new", "passage": "It is old.", "label": False},
    ],
    "CB": [
        {"premise": "It rains.", "hypothesis": "It is wet", "label": "entailment"},
        {"premise": "It rains.", "hypothesis": "It is dry", "label": "contradiction"},
        {"premise": "It rains.", "hypothesis": "It is Monday", "label": "neutral"},
    ],
    "COPA": [
        {
            "premise": "The man fell. ",
            "choice1": "He slipped.",
            "choice2": "He sang.",
            "question": "cause",
            "label": 0,
        }
    ],
    "MultiRC": [
        {
            "passage": {
                "text": "Ann sings.",
                "questions": [
                    {
                        "question": "Who sings?",
                        "answers": [{"text": "Ann", "label": 1}, {"text": "Bob", "label": 0}],
                    }
                ],
            }
        }
    ],
    "ReCoRD": [
        {
            "passage": ENTITIES,
            "qas": [{"query": "@placeholder was met by Ann", "answers": [{"text": "Bob"}]}],
        }
    ],
    "RTE": [{"premise": "It rains.", "hypothesis": "It is wet.", "label": "entailment"}],
    "WiC": [{"word": "run", "sentence1": "I run.", "sentence2": "A long run.", "label": False}],
    "WSC": [
        {
            "text": "Ann saw Bob and he ran.",
            "target": {"span1_text": "Bob", "span2_text": "he"},
            "label": True,
        }
    ],
}


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    level = logging.getLogger("lm_eval").level
    yield
    logging.getLogger("lm_eval").setLevel(level)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(host: object, *_: object, **__: object) -> None:
        raise AssertionError(f"looked up {host}")

    monkeypatch.setattr("socket.getaddrinfo", no_network)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in EXAMPLES.items():
        for split in ("train", "val"):
            write_rows(folder / name / f"{split}.jsonl", rows)
    write_rows(folder / "lambada" / "test.jsonl", [{"text": "the cat and the dog"}] * 3)
    (folder / "wikitext-2").mkdir()
    (folder / "wikitext-2" / "test.txt").write_text(
        " \n = First = \n \n A state is a value . \n = = Part = = \n More . \n"
        " = Second = \n Text . \n"
    )
    return folder


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig("h3 attention(position=rope)", 256, 16)).eval()


def encoded(text: str) -> list[int]:
    return list(text.encode())


@torch.no_grad()
def log_likelihood(model: LanguageModel, context: str, continuation: str) -> float:
    """One forward pass over the whole text."""
    before, after = encoded(context), encoded(continuation)
    logits = model(torch.tensor([before + after]))[0, len(before) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(after)[:, None]).double().sum())


def lm(model: LanguageModel, **settings: Any) -> Any:
    from stateline.evaluate.harness.model import StatelineLM

    return StatelineLM(model, **{"tokenizer": ByteTokenizer(), **settings})


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


PAIRS = [
    ("A state is", " a value"),
    ("A state is", " a"),
    ("A state was", " here"),
    ("Another", " x"),
    ("A state is", " a value"),
]


@slow
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_likelihoods_are_those_of_whole_texts(model: LanguageModel, batch_size: int) -> None:
    judge = lm(model, batch_size=batch_size)
    found = judge.loglikelihood([asked(*pair) for pair in PAIRS], disable_tqdm=True)
    wanted = [log_likelihood(model, *pair) for pair in PAIRS]
    assert [likelihood for likelihood, _ in found] == pytest.approx(wanted, abs=1e-5)


@slow
def test_a_context_of_white_space_is_none(model: LanguageModel) -> None:
    """lm-eval gives its spaces to the continuation."""
    pairs = [asked(context, " yes") for context in (" ", "A state is")]
    ((found, _), _) = lm(model).loglikelihood(pairs, disable_tqdm=True)
    assert found == pytest.approx(log_likelihood(model, "\n", "  yes"), abs=1e-5)


@slow
def test_a_continuation_is_greedy_if_the_model_would_write_it(model: LanguageModel) -> None:
    prompt = torch.tensor([encoded("A state")])
    written = generate(model, prompt, 3)[0].tolist()
    other = [*written[:2], (written[2] + 1) % 256]
    requests = [(("", ""), encoded("A state"), tokens) for tokens in (written, other)]
    assert [greedy for _, greedy in lm(model)._loglikelihood_tokens(requests)] == [True, False]


@slow
def test_contexts_are_read_once_and_their_common_beginning_too(model: LanguageModel) -> None:
    shots = "An example. " * 20
    questions = [f"{shots}Question {number}:" for number in range(4)]
    judge = lm(model, batch_size=4)
    requests = [asked(question, answer) for question in questions for answer in (" no", " yes")]
    judge.loglikelihood(requests, disable_tqdm=True)
    common = len(f"{shots}Question ")
    assert judge.tokens_read == common + 4 * len("0:") + 4 * (len(" no") + len(" yes") - 2)


@slow
@pytest.mark.parametrize("max_len", [None, 12])
def test_whole_texts_are_scored_as_one_forward_pass_or_in_windows(max_len: int | None) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3", 256, 16, max_len=max_len)).eval()
    text = "A state is a value, and it is small." * (1 if max_len else 60)
    judge = lm(model)
    (found,) = judge.loglikelihood_rolling([asked(text)])
    tokens = [*encoded("\n"), *encoded(text)]  # a text begins with a new line
    if max_len is None:
        wanted = log_likelihood(model, "\n", text)
        assert judge.tokens_read == len(text)
    else:  # each window follows the one before; its first token is that window's last context
        wanted = 0.0
        for start in range(1, len(tokens), max_len):
            end = min(start + max_len, len(tokens))
            first = end - max_len if end - start < max_len and start > 1 else start
            window = torch.tensor([tokens[max(0, first - 1) : end - 1]])
            with torch.no_grad():
                p = model(window)[0, -(end - start) :].log_softmax(-1)
            wanted += float(p.gather(1, torch.tensor(tokens[start:end])[:, None]).sum())
    assert found == pytest.approx(wanted, abs=3e-4)


@slow
def test_of_a_context_the_end_is_read_that_fits_the_model() -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3", 256, 16, max_len=12)).eval()
    judge, context = lm(model), "a context of more than twelve tokens"
    ((found, _),) = judge.loglikelihood([asked(context, " yes")], disable_tqdm=True)
    tokens = torch.tensor(encoded(context[-9:] + " yes"))  # the last one is not read
    with torch.no_grad():
        p = model(tokens[None, :-1])[0, -4:].log_softmax(-1)
    wanted = float(p.gather(1, tokens[-4:, None]).double().sum())
    assert found == pytest.approx(wanted, abs=1e-5)
    (text,) = judge.generate_until([asked(context, {"until": ["\n"], "max_gen_toks": 5})])
    written = generate(model, torch.tensor([encoded(context[-7:])]), 5)[0].tolist()
    assert text == bytes(written).decode(errors="replace").partition("\n")[0]
    with pytest.raises(InputError, match="texts of up to 12 tokens are read, got 12 after"):
        judge.loglikelihood([asked("a", "x" * 13)], disable_tqdm=True)


@slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_are_written_up_to_the_stop_string(model: LanguageModel, batch_size: int) -> None:
    contexts = ["A state", "It is", "A much longer context"]
    free = {}
    for context in contexts:
        tokens = generate(model, torch.tensor([encoded(context)]), 12)[0].tolist()
        free[context] = bytes(tokens).decode(errors="replace")
    stop = free["It is"][5]
    requests = [asked(c, {"until": ["", stop], "max_gen_toks": 12}) for c in contexts]
    found = lm(model, batch_size=batch_size).generate_until(requests)
    assert found == [free[context].partition(stop)[0] for context in contexts]


class Ending(ByteTokenizer):
    """Has a token that ends a text."""

    def __init__(self, end: int) -> None:
        self.end = end

    @property
    def end_of_text(self) -> int:
        return self.end


@slow
def test_a_text_may_begin_with_nothing_and_ends_at_the_token_that_ends_texts(
    model: LanguageModel,
) -> None:
    settings = {"until": [], "max_gen_toks": 12}
    after_newline, tokens = (
        generate(model, torch.tensor([encoded(context)]), 12)[0].tolist() for context in "\nA"
    )
    (text,) = lm(model).generate_until([asked("", settings)])
    assert text == bytes(after_newline).decode(errors="replace")
    place = next(n for n in range(1, 12) if tokens[n] not in tokens[:n])
    (text,) = lm(model, tokenizer=Ending(tokens[place])).generate_until([asked("A", settings)])
    assert text == bytes(tokens[:place]).decode(errors="replace")
    ended, not_empty = lm(model, tokenizer=Ending(tokens[0])).generate_until(
        [asked("A", settings), asked("A", settings | {"min_new_tokens": 1})]
    )
    assert (ended, bool(not_empty)) == ("", True)


@slow
def test_sampling_is_refused(model: LanguageModel) -> None:
    settings = {"until": ["\n"], "do_sample": True, "temperature": 1.0}
    with pytest.raises(InputError, match="written greedily"):
        lm(model).generate_until([asked("a", settings)])


@slow
def test_all_local_tasks_give_scores(model: LanguageModel, data: Path) -> None:
    questions = [name for name in LOCAL_TASKS if name != "wikitext"]
    found = run_suite(model, ByteTokenizer(), questions, data=data, shots=1)
    found += run_suite(model, ByteTokenizer(), ["wikitext"], data=data)
    assert {metric.task for metric in found} == set(LOCAL_TASKS)
    accuracies = [metric.value for metric in found if metric.name == "acc"]
    assert len(accuracies) == 17
    assert all(0 <= value <= 1 for value in accuracies)


@slow
@pytest.mark.parametrize("shots", [0, 2])
def test_ranking_takes_the_likeliest_answer(model: LanguageModel, data: Path, shots: int) -> None:
    found, _ = run_suite(model, ByteTokenizer(), ["cb"], data=data, shots=shots)
    names = {"entailment": "True", "contradiction": "False", "neutral": "Neither"}
    asked_by = [
        f"{row['premise']}\nQuestion: {row['hypothesis']}. True, False, or Neither?\nAnswer:"
        for row in EXAMPLES["CB"]
    ]
    answers = [f" {names[row['label']]}" for row in EXAMPLES["CB"]]
    solved = [text + answer + "\n\n" for text, answer in zip(asked_by, answers, strict=True)]
    right = []
    for text, answer in zip(asked_by, answers, strict=True):
        context = "".join(solved[:shots]) + text
        scores = {f" {n}": log_likelihood(model, context, f" {n}") for n in names.values()}
        right.append(max(scores, key=scores.__getitem__) == answer)
    assert found.value == pytest.approx(sum(right) / len(right))


@slow
def test_an_untrained_model_is_at_chance(model: LanguageModel, tmp_path: Path) -> None:
    rows = [
        {"question": f"is it {number}", "passage": f"It is {number}.", "label": number % 2 == 0}
        for number in range(200)
    ]
    for split in ("train", "val"):
        write_rows(tmp_path / "BoolQ" / f"{split}.jsonl", rows)
    (found,) = run_suite(model, ByteTokenizer(), ["boolq"], data=tmp_path, limit=190)
    assert found.examples == 190
    assert found.stderr is not None
    assert abs(found.value - 0.5) < 4 * max(found.stderr, 0.035)


@slow
def test_perplexity_per_word_is_that_of_the_articles(model: LanguageModel, data: Path) -> None:
    found = {m.name: m.value for m in run_suite(model, ByteTokenizer(), ["wikitext"], data=data)}
    text = (data / "wikitext-2" / "test.txt").read_text()
    split = text.index(" = Second")
    articles = [text[text.index(" = First") : split - 1], text[split:]]
    total = sum(log_likelihood(model, "\n", tasks.detokenised(a)) for a in articles)
    words = sum(len(re.split(r"\s+", a)) for a in articles)
    size = sum(len(article.encode()) for article in articles)
    e = torch.tensor
    assert found["word_perplexity"] == pytest.approx(float(e(-total / words).exp()), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(-total / size / 0.6931471805599453, rel=1e-6)


@slow
def test_what_is_scored_of_wikitext_is_what_lm_eval_scores() -> None:
    theirs = importlib.import_module("lm_eval.tasks.wikitext.preprocess_wikitext")
    pieces = [*"abNs=()[]{}\"':;.!?,@-°2", " ", " \n", "'s", "@-@", "@,@", "@.@"]
    drawn = random.Random(0)
    for _ in range(2000):
        page = "".join(p + " " * drawn.randint(0, 1) for p in drawn.choices(pieces, k=40))
        assert tasks.detokenised(page) == theirs.wikitext_detokenizer({"page": page})
        likelihood = [-7.0]
        row = {"page": page}
        assert tasks._score_article(row, likelihood) == theirs.process_results(row, likelihood)


@slow
def test_the_scores_agree_with_lm_evals_own_model_class(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    import stateline.hf as hf

    text = hf.tokenizer(ByteTokenizer())
    text.eos_token = text.pad_token
    theirs = HFLM(pretrained=hf.wrap(model), tokenizer=text, batch_size=2, max_length=256)
    requests = [asked(*pair) for pair in PAIRS]
    wanted = theirs.loglikelihood(requests, disable_tqdm=True)
    found = lm(model).loglikelihood(requests, disable_tqdm=True)
    for (likelihood, greedy), (other, same) in zip(found, wanted, strict=True):
        assert likelihood == pytest.approx(other, abs=1e-5)
        assert greedy == same
    writing = [asked(c, {"until": ["\n"], "max_gen_toks": 8}) for c in ("A state", "It is")]
    assert lm(model).generate_until(writing) == theirs.generate_until(writing, disable_tqdm=True)


@slow
def test_the_scores_agree_with_lm_evals_own_model_class_where_a_token_begins_texts(
    model: LanguageModel,
) -> None:
    from lm_eval.models.huggingface import HFLM
    from tokenizers.processors import TemplateProcessing

    import stateline.hf as hf

    class Begun(ByteTokenizer):
        beginning = (1,)

    text = hf.tokenizer(ByteTokenizer())
    text.bos_token, text.eos_token = text.convert_ids_to_tokens(1), text.pad_token
    named = [(text.bos_token, 1)]
    text.backend_tokenizer.post_processor = TemplateProcessing(
        single=[text.bos_token, "$A"], special_tokens=named
    )
    settings = {"pretrained": hf.wrap(model), "tokenizer": text, "max_length": 256}
    theirs, ours = HFLM(**settings), lm(model, tokenizer=Begun())
    requests = [asked(*pair) for pair in (*PAIRS, ("", "A state"), ("\x01A state is", " a"))]
    found, wanted = (each.loglikelihood(requests, disable_tqdm=True) for each in (ours, theirs))
    assert [n for n, _ in found] == pytest.approx([n for n, _ in wanted], abs=1e-5)
    writing = [asked(c, {"until": ["\n"], "max_gen_toks": 8}) for c in ("A state", "It is")]
    assert ours.generate_until(writing) == theirs.generate_until(writing, disable_tqdm=True)
    texts = [asked("A state is a value")]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts, disable_tqdm=True), abs=1e-4
    )


@pytest.fixture
def folder(model: LanguageModel, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "run")
    return tmp_path / "run"


@slow
@pytest.mark.parametrize("size", ["auto", "auto:4", 0, -1])
def test_batches_have_a_number_of_contexts(model: LanguageModel, size: int | str) -> None:
    with pytest.raises(InputError, match="batch_size must be a number of contexts, got"):
        lm(model, batch_size=size)


@slow
def test_lm_eval_makes_the_registered_model_from_a_folder(
    model: LanguageModel, folder: Path
) -> None:
    from lm_eval.api.registry import get_model

    made = lm(model, batch_size=2)
    arguments = f"path={folder},tokenizer=byte"
    read = get_model("stateline").create_from_arg_string(arguments, {"batch_size": "2"})
    assert read.batch_size == 2
    wanted, found = (
        one.loglikelihood([asked(*pair) for pair in PAIRS], disable_tqdm=True)
        for one in (made, read)
    )
    assert found == wanted
    for given in ((), (model,), (None, ByteTokenizer())):
        with pytest.raises(InputError, match="needs a model and a tokenizer"):
            type(made)(*given)
    letters = folder.parent / "letters.json"
    CharacterTokenizer("abc").save(letters)
    read = get_model("stateline").create_from_arg_string(f"path={folder},tokenizer={letters}")
    assert read.tok_encode("ca") == [2, 0]


@slow
def test_the_command_prints_and_writes_scores(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    options = ["--tasks", "boolq", "copa_gen", "--data", data, "--shots", 1, "--limit", 2]
    assert main(["evaluate", str(folder), *map(str, options), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert [score["task"] for score in record["scores"]] == ["boolq", "copa_gen"]
    assert record["shots"] == 1
    boolq = Metric(**record["scores"][0])
    assert f"{boolq.value:.4f}" in printed
    assert f"{boolq.stderr:.4f}" in printed


@slow
def test_tasks_of_the_user_are_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"q": "one two", "a": " three"}] * 2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "output_type: loglikelihood\ntest_split: test\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    options = ["--tasks", "mine", "--tasks_path", str(tmp_path / "mine")]
    assert main(["evaluate", str(folder), *options]) == 0
    assert "mine" in capsys.readouterr().out
    assert main(["evaluate", str(folder), "--tasks", "mien", *options[2:]]) == 2
    assert "did you mean 'mine'" in capsys.readouterr().err


@slow
@pytest.mark.parametrize(("shots", "examples"), [(None, 1), (0, 0), (2, 2)])
def test_a_task_of_the_user_keeps_its_number_of_examples_unless_another_is_given(
    model: LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shots: int | None,
    examples: int,
) -> None:
    from stateline.evaluate.harness.model import StatelineLM

    write_rows(tmp_path / "rows.jsonl", [{"q": f"count {n}", "a": f" {n}"} for n in range(4)])
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "output_type: loglikelihood\ntest_split: test\nfewshot_split: test\nnum_fewshot: 1\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    contexts: list[str] = []

    def note(_: Any, requests: Any, **__: Any) -> list[tuple[float, bool]]:
        contexts.extend(texts[0] for texts, *_ in requests)
        return [(0.0, True)] * len(requests)

    monkeypatch.setattr(StatelineLM, "_loglikelihood_tokens", note)
    run_suite(model, ByteTokenizer(), ["mine"], tasks_path=tmp_path, shots=shots)
    assert [text.count("count") for text in contexts] == [examples + 1] * 4


@pytest.mark.parametrize(("name", "value"), [("shots", -1), ("limit", 0), ("rows", 0)])
def test_a_number_out_of_range_is_refused(model: LanguageModel, name: str, value: int) -> None:
    with pytest.raises(InputError, match=f"must be at least {value + 1}, got {name}={value}"):
        run_suite(model, ByteTokenizer(), ["boolq"], **{name: value})  # type: ignore[arg-type]


Change = Callable[[Path], object]


def put(path: Path, **fields: object) -> None:
    """Other fields in the first row of a file."""
    write_rows(path, [{**json.loads(path.read_text().splitlines()[0]), **fields}])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("boolq", lambda f: (f / "BoolQ" / "val.jsonl").unlink(), "cannot read the data of a task"),
        ("boolq", lambda f: (f / "BoolQ" / "val.jsonl").write_text("{}\n"), "line 1 of .*passage"),
        ("cb", lambda f: (f / "CB" / "val.jsonl").write_text("no\n"), "line 1 of .* is not JSON"),
        ("rte", lambda f: (f / "RTE" / "train.jsonl").write_text(""), "holds no example"),
        ("bolq", lambda _: None, "did you mean 'boolq'"),
        ("boolq", lambda f: put(f / "BoolQ" / "val.jsonl", label=2), r"answer \[2\] of 2"),
        ("boolq", lambda f: put(f / "BoolQ" / "val.jsonl", label=-1), r"answer \[-1\] of 2"),
        ("copa", lambda f: (f / "COPA" / "val.jsonl").write_bytes(b"\xff"), "not UTF-8 text"),
    ],
)
def test_data_that_cannot_be_used_is_one_line(
    tmp_path: Path, name: str, change: Change, message: str
) -> None:
    for folder, rows in EXAMPLES.items():
        for split in ("train", "val"):
            write_rows(tmp_path / folder / f"{split}.jsonl", rows)
    change(tmp_path)
    with pytest.raises(InputError, match=message):
        tasks.task_settings(name, tmp_path, ByteTokenizer())


def test_of_equally_likely_answers_the_first_is_taken(data: Path) -> None:
    settings = tasks.task_settings("boolq", data, ByteTokenizer())
    for right, accuracy in ((0, 1.0), (1, 0.0)):
        row = {"choices": ["no", "yes"], "right": [right]}
        assert settings["process_results"](row, [(-1.0, False)] * 2) == {"acc": accuracy}


def test_an_article_is_divided_by_its_words_and_by_its_bytes(data: Path) -> None:
    settings = tasks.task_settings("wikitext", data, ByteTokenizer())
    found = settings["process_results"]({"page": " \n ein Übel \n"}, [-3.0])
    # as lm-evaluation-harness counts: also the empty words before and after the text
    assert found["word_perplexity"] == (-3.0, 4)
    assert found["byte_perplexity"] == found["bits_per_byte"] == (-3.0, 14)


def test_a_task_without_data_says_what_it_needs() -> None:
    with pytest.raises(InputError, match=r"read from BoolQ/train.jsonl and BoolQ/val.jsonl: give"):
        tasks.task_settings("boolq", None, ByteTokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either text files, --task or --tasks"),
        (["book.txt", "--tasks", "boolq"], "give either text files, --task or --tasks"),
    ],
)
def test_files_and_tasks_exclude_each_other(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(folder), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("lm_eval", ["evaluate", "RUN", "--tasks", "boolq"], "stateline[eval]"),
        ("transformers", ["export", "RUN", "DST"], "stateline[hf]"),
    ],
)
def test_a_missing_package_is_one_line_that_names_the_extra(
    package: str,
    command: list[str],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main([str(tmp_path) if word == "RUN" else word for word in command]) == 2
    assert f"pip install '{extra}'" in capsys.readouterr().err


@slow
@torch.no_grad()
def test_texts_beyond_the_training_are_cut_as_by_hflm() -> None:
    """A rotary model has no limit of its own: one that begins every window anew is the measure."""
    from lm_eval.api.instance import Instance

    from stateline.evaluate.harness.model import StatelineLM

    torch.manual_seed(0)
    settings = {"layers": {"attention": {"position": "rope"}}}
    config = ModelConfig("attention", 256, 16, trained_len=8, **settings)
    model = LanguageModel(config).eval()
    text, lm = "abcdefghijklmnopqrst", StatelineLM(model, ByteTokenizer())
    start, total = lm.prefix_token_id, 0.0
    tokens = [start, *text.encode()]
    for first, end in ((0, 8), (8, 16), (12, 20)):  # the last window ends with the text
        window = torch.tensor([tokens[first : end + 1]])
        losses = token_losses(model(window[:, :-1]), window[:, 1:])[0]
        total -= float(losses[4 if first == 12 else 0 :].sum())
    (found,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    assert found == pytest.approx(total, abs=1e-4)
