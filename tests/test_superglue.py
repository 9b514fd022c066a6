"""The scores of SuperGLUE are those of plain loops, by ranking and by generation."""

import json
from pathlib import Path

import pytest
import torch

from stateline.data import ByteTokenizer
from stateline.evaluate.harness import LOCAL_TASKS, run_suite, tasks
from stateline.evaluate.harness.measures import (
    ANSWER_F1,
    MACRO_F1,
    NAME_F1,
    NAME_MATCH,
    QUESTION_MATCH,
    Measure,
)
from stateline.evaluate.harness.superglue import RANKED, Question
from stateline.generate import answer
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from tests.test_harness import EXAMPLES, write_rows

pytestmark = [pytest.mark.usefixtures("unannotated"), pytest.mark.filterwarnings("default")]

NAMES = ["Ann Lee", "the Ann", "Bob"]


def score(measure: Measure, questions: list[Question], chosen: list[int | None]) -> float:
    values = [measure.value(q._asdict(), n) for q, n in zip(questions, chosen, strict=True)]
    return measure.combine(values)


def asked(*right: int, group: str = "") -> list[Question]:
    return [Question("", ["a", "b", "c"], [number], group, NAMES) for number in right]


@pytest.mark.parametrize(
    ("name", "text", "choices", "right"),
    [
        (
            "boolq",
            "A state is a value.\nQuestion: is a state a value?\nAnswer:",
            ["no", "yes"],
            [1, 0],
        ),
        (
            "cb",
            "It rains.\nQuestion: It is wet. True, False, or Neither?\nAnswer:",
            ["True", "False", "Neither"],
            [0, 1, 2],
        ),
        ("copa", "The man fell because", ["he slipped.", "he sang."], [0]),
        (
            "multirc",
            "Ann sings.\nQuestion: Who sings?\nAnswer: Ann\nIs the answer right?",
            ["no", "yes"],
            [1, 0],
        ),
        (
            "record",
            "Ann met Bob in Rome.\n-\nAnn left.\n",
            ["Ann was met by Ann", "Bob was met by Ann"],
            [1],
        ),
        (
            "record_gen",
            "Ann met Bob in Rome.\n-\nAnn left.\n@placeholder was met by Ann\n"
            "Question: What does @placeholder stand for?\nAnswer:",
            ["Ann", "Bob"],
            [1],
        ),
        ("rte", "It rains.\nQuestion: It is wet. True or False?\nAnswer:", ["True", "False"], [0]),
        (
            "wic",
            "I run.\nA long run.\nQuestion: Is the word 'run' used in the same sense in the two "
            "sentences above?\nAnswer:",
            ["no", "yes"],
            [0],
        ),
        (
            "wsc",
            "Passage: Ann saw Bob and he ran.\nQuestion: In the passage above, does the pronoun "
            '"he" refer to "Bob"?\nAnswer:',
            ["no", "yes"],
            [1],
        ),
    ],
)
def test_the_rows_of_a_file_become_questions(
    name: str, text: str, choices: list[str], right: list[int]
) -> None:
    task = RANKED[name.removesuffix("_gen")]
    parse = task.written if name.endswith("_gen") and task.written else task.questions
    rows = EXAMPLES[task.files[0].partition("/")[0]]
    found = [question for row in rows for question in parse(row)]
    assert (found[0].text, found[0].choices) == (text, choices)
    assert [question.right for question in found] == [[number] for number in right]


def test_copa_also_asks_for_effects() -> None:
    (question,) = RANKED["copa"].questions(EXAMPLES["COPA"][0] | {"question": "effect"})
    assert question.text == "The man fell therefore"


def test_answers_are_written_after_a_space_and_ranked_inside_their_query(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_rows(tmp_path / "ReCoRD" / f"{split}.jsonl", EXAMPLES["ReCoRD"])
    ranked, written = (
        tasks.task_settings(name, tmp_path, ByteTokenizer()) for name in ("record", "record_gen")
    )
    assert (ranked["target_delimiter"], written["target_delimiter"]) == ("", " ")
    assert written["generation_kwargs"]["max_gen_toks"] == len(" Bob") + 1


def test_the_f1_of_cb_is_the_mean_over_its_classes() -> None:
    # two of three right and chosen; one of two right and chosen; never chosen
    chosen: list[int | None] = [0, 0, 1, 1, 0, None]
    found = score(MACRO_F1, asked(0, 0, 0, 1, 2, 1), chosen)
    assert found == pytest.approx((2 * 2 / (3 + 3) + 2 * 1 / (2 + 2) + 0) / 3)
    # class 1 is chosen, but never right
    assert score(MACRO_F1, asked(0, 0), [0, 1]) == pytest.approx((2 * 1 / (2 + 1) + 0) / 2)


def test_multirc_is_scored_by_answers_and_by_whole_questions() -> None:
    questions = [*asked(1, 0, group="x"), *asked(1, 1, group="y"), *asked(0, group="z")]
    chosen: list[int | None] = [1, 0, 1, 0, 1]
    assert score(ANSWER_F1, questions, chosen) == pytest.approx(2 * 2 / (3 + 3))
    assert score(QUESTION_MATCH, questions, chosen) == pytest.approx(1 / 3)
    assert score(ANSWER_F1, questions, [0] * 5) == 0
    assert score(QUESTION_MATCH, questions, [1, 0, 1, 1, None]) == pytest.approx(2 / 3)
    assert score(QUESTION_MATCH, asked(1, 0, group="x"), [0, 0]) == 0
    assert score(ANSWER_F1, asked(0), [0]) == 0  # no answer is right or chosen


def test_record_compares_the_words_of_names() -> None:
    (question,) = asked(0)
    both = question._replace(right=[0, 2])
    assert score(NAME_F1, [question] * 3, [0, 1, 2]) == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert score(NAME_F1, [both] * 2, [2, None]) == pytest.approx(1 / 2)
    assert score(NAME_MATCH, [both] * 3, [2, 1, None]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("right", "chosen", "f1", "same"),
    [
        ("U.S. Bank", "the us bank", 1, 1),
        ("New York, New York", "New York", 2 * 2 / (4 + 2), 0),
        ("New York, New York", "york new york new", 1, 0),
        ("O", "Theo", 0, 0),  # no article within a word
        ("The The", None, 0, 0),  # a name of articles alone
    ],
)
def test_names_are_compared_without_case_punctuation_and_articles(
    right: str, chosen: str | None, f1: float, same: float
) -> None:
    question = Question("", [], [0], names=[right, chosen or ""])
    number = None if chosen is None else 1
    assert score(NAME_F1, [question], [number]) == pytest.approx(f1)
    assert score(NAME_MATCH, [question], [number]) == same


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" Yes.", 1),
        ("yes, it is", 1),
        ("yesterday", None),
        (" No", 0),
        ("it is no", None),
        ("", None),
    ],
)
def test_a_written_text_gives_the_answer_that_it_begins_with(text: str, number: int) -> None:
    assert tasks._written({"choices": ["no", "yes"], "right": [0]}, text) == number


def test_the_longest_matching_answer_counts_and_a_right_one_if_equal() -> None:
    row = {"choices": ["it rained", "it rained hard", "It rained, hard."], "right": [1]}
    assert tasks._written(row, "It rained hard and long") == 1
    assert tasks._written(row, "It rained.") == 0


slow = pytest.mark.slow  # importing lm-eval takes seconds


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig("h3 attention(position=rope)", 256, 16, tie_embeddings=False)
    return LanguageModel(config).eval()


@pytest.fixture(scope="module")
def official(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first rows of SuperGLUE's own files; ReCoRD has no val file here."""
    found: Path = request.config.getoption("--data") / "superglue"
    if not found.is_dir():
        pytest.skip(f"no SuperGLUE in {found}")
    folder = tmp_path_factory.mktemp("superglue")
    for task in RANKED.values():
        for name, rows in zip(task.files, (8, 24), strict=True):
            source = found / name
            source = source if source.exists() else source.with_name("dev32.jsonl")
            (folder / name).parent.mkdir(exist_ok=True)
            lines = source.read_text().splitlines()[: 1 if "RC" in name else rows]
            (folder / name).write_text("\n".join(lines))
    return folder


def questions(folder: Path, name: str) -> tuple[list[Question], list[Question], str]:
    """Those to learn from, those to score, and what stands before an answer."""
    task = RANKED[name.removesuffix("_gen")]
    writes = name.endswith("_gen")
    parse = task.written if writes and task.written else task.questions
    learn, judge = (
        [q for line in (folder / file).read_text().splitlines() for q in parse(json.loads(line))]
        for file in task.files
    )
    return learn, judge, " " if writes else task.delimiter


@torch.no_grad()
def likeliest(model: LanguageModel, context: str, choices: list[str]) -> int:
    scores = []
    for choice in choices:
        before, after = [*context.encode()], [*choice.encode()]
        logits = model(torch.tensor([before + after]))[0, len(before) - 1 : -1]
        picked = logits.log_softmax(-1).gather(1, torch.tensor(after)[:, None])
        scores.append(float(picked.double().sum()))
    return scores.index(max(scores))


def written(model: LanguageModel, context: str, question: Question, limit: int) -> int | None:
    (text,) = answer(model, ByteTokenizer(), [[*context.encode()]], [limit], stop=["\n"])
    plain = "".join(c for c in text.lower() if c.isalnum() or c.isspace() or ord(c) > 127).split()
    begun = [n for n, c in enumerate(question.choices) if plain[: len(c.split())] == c.split()]
    return begun[0] if begun else None


def plain_scores(questions: list[Question], chosen: list[int | None]) -> dict[str, float]:
    """Scores of CB and MultiRC by scikit-learn, and accuracy."""
    metrics = pytest.importorskip("sklearn.metrics")
    right = [q.right[0] for q in questions]
    guessed = [-1 if n is None else n for n in chosen]
    labels = sorted({*right, *guessed} - {-1})
    macro = metrics.f1_score(right, guessed, labels=labels, average="macro", zero_division=0)
    by_question: dict[str, list[bool]] = {}
    for question, number in zip(questions, chosen, strict=True):
        by_question.setdefault(question.group, []).append(number in question.right)
    ones = metrics.f1_score(right, guessed, labels=[1], average="macro", zero_division=0)
    accuracy = [n in q.right for q, n in zip(questions, chosen, strict=True)]
    whole = [all(answers) for answers in by_question.values()]
    return {
        "acc": sum(accuracy) / len(accuracy),
        "f1": macro,
        "f1a": ones,
        "em": sum(whole) / len(whole),
    }


@slow
@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("name", ["cb", "multirc", "copa", "wic", "wsc"])
def test_ranking_gives_the_scores_of_a_plain_loop(
    model: LanguageModel, official: Path, name: str, shots: int
) -> None:
    learn, judge, delimiter = questions(official, name)
    solved = "".join(f"{q.text}{delimiter}{q.choices[q.right[0]]}\n\n" for q in learn[:shots])
    chosen: list[int | None] = [
        likeliest(model, solved + q.text, [delimiter + choice for choice in q.choices])
        for q in judge
    ]
    wanted = plain_scores(judge, chosen)
    for found in run_suite(model, ByteTokenizer(), [name], data=official, shots=shots):
        assert found.value == pytest.approx(wanted[found.name]), found.name


def writer(text: str) -> LanguageModel:
    """A model that writes a text of different letters after every colon, in small letters."""
    model = LanguageModel(ModelConfig("lstm", 256, 256, tie_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in model.stack.parameters():
            parameter.zero_()
        model.embedding.weight.copy_(torch.eye(256))
        model.head.weight.zero_()
        for before, after in zip(f":{text}", f"{text}\n", strict=True):
            model.head.weight[ord(after), ord(before)] = 1.0
    return model


@slow
@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize(
    ("name", "text"), [("cb_gen", " True"), ("rte_gen", " False."), ("multirc_gen", " yes")]
)
def test_generation_gives_the_scores_of_a_plain_loop(
    official: Path, name: str, text: str, shots: int
) -> None:
    model = writer(text)
    learn, judge, delimiter = questions(official, name)
    lowered = [q._replace(choices=[c.lower() for c in q.choices]) for q in judge]
    solved = "".join(f"{q.text}{delimiter}{q.choices[q.right[0]]}\n\n" for q in learn[:shots])
    chosen = [written(model, solved + q.text, q, 9) for q in lowered]
    wanted = plain_scores(judge, chosen)
    assert name == "multirc_gen" or 0 < wanted["acc"] < 1
    for found in run_suite(model, ByteTokenizer(), [name], data=official, shots=shots):
        assert found.value == pytest.approx(wanted[found.name]), found.name


@slow
@pytest.mark.parametrize("shots", [0, 3])
def test_all_tasks_run_on_the_official_files(
    model: LanguageModel, official: Path, shots: int
) -> None:
    names = [name for name in LOCAL_TASKS if name.removesuffix("_gen") in RANKED]
    found = run_suite(model, ByteTokenizer(), names, data=official, shots=shots, limit=3)
    scores = {name: {m.name for m in found if m.task == name} for name in names}
    extra = {"cb": {"f1"}, "multirc": {"f1a", "em"}, "record": {"f1", "em"}}
    assert scores == {name: {"acc"} | extra.get(name.removesuffix("_gen"), set()) for name in names}
    assert all(0 <= m.value <= 1 for m in found)


@slow
def test_an_untrained_model_is_at_chance_on_the_official_files(
    model: LanguageModel, request: pytest.FixtureRequest
) -> None:
    data: Path = request.config.getoption("--data") / "superglue"
    if not data.is_dir():
        pytest.skip(f"no SuperGLUE in {data}")
    n = 80
    names = ["copa", "rte", "wic"]
    found = {m.task: m for m in run_suite(model, ByteTokenizer(), names, data=data, limit=n)}
    for metric in found.values():
        assert abs(metric.value - 0.5) < 4 * 0.5 / metric.examples**0.5
