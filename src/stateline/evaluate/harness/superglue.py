"""SuperGLUE as questions with possible answers.

References:
    Wang et al., "SuperGLUE", 2019. The questions are worded as in Brown et al., "Language Models
    are Few-Shot Learners", 2020, appendix G, where a task is in it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stateline.evaluate.harness.measures import (
    ANSWER_F1,
    MACRO_F1,
    NAME_F1,
    NAME_MATCH,
    QUESTION_MATCH,
    Measure,
)

Problem = Mapping[str, Any]


class Question(NamedTuple):
    """A question with its possible answers.

    Attributes:
        text: What stands before the answer.
        choices: The possible answers.
        right: Numbers of the right ones.
        group: Questions of one group are scored together by some measures.
        names: What the choices stand for, if they are longer texts.
    """

    text: str
    choices: list[str]
    right: list[int]
    group: str = ""
    names: Sequence[str] = ()


class Ranked(NamedTuple):
    """A task of questions.

    Attributes:
        files: Files with examples to learn from and to score, below the folder of data.
        questions: The questions that one row of a file holds.
        measures: Scores beside accuracy.
        delimiter: What stands between a question and an answer that is ranked.
        written: The same questions for generation, if ``questions`` are only for ranking.
    """

    files: tuple[str, str]
    questions: Callable[[Problem], Iterator[Question]]
    measures: tuple[Measure, ...] = ()
    delimiter: str = " "
    written: Callable[[Problem], Iterator[Question]] | None = None


def _labelled(
    text: str, choices: list[str], right: Callable[[Any], int] = int
) -> Callable[[Problem], Iterator[Question]]:
    """One question for each row, with the number of the right answer by the row's label."""
    return lambda row: iter([Question(text.format(**row), choices, [right(row["label"])])])


def _copa(row: Problem) -> Iterator[Question]:
    joint = "because" if row["question"] == "cause" else "therefore"
    choices = [choice[:1].lower() + choice[1:] for choice in (row["choice1"], row["choice2"])]
    yield Question(f"{row['premise'].strip()[:-1]} {joint}", choices, [int(row["label"])])


def _multirc(row: Problem) -> Iterator[Question]:
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            text = (
                f"{row['passage']['text']}\nQuestion: {question['question']}\n"
                f"Answer: {answer['text']}\nIs the answer right?"
            )
            group = f"{row['passage']['text']}\n{question['question']}"
            yield Question(text, ["no", "yes"], [int(answer["label"])], group)


def _record(row: Problem) -> Iterator[Question]:
    """The choices are the query with each name in place of the gap."""
    text = row["passage"]["text"].replace("@highlight", "-") + "\n"
    for query, names, right in _queries(row):
        choices = [query.replace("@placeholder", name) for name in names]
        yield Question(text, choices, right, names=names)


def _record_written(row: Problem) -> Iterator[Question]:
    """The choices are the names."""
    passage = row["passage"]["text"].replace("@highlight", "-")
    for query, names, right in _queries(row):
        text = f"{passage}\n{query}\nQuestion: What does @placeholder stand for?\nAnswer:"
        yield Question(text, names, right, names=names)


def _queries(row: Problem) -> Iterator[tuple[str, list[str], list[int]]]:
    """Queries with a gap, the names of the passage, and the numbers of the right ones."""
    passage = row["passage"]["text"]
    spans = ((e["start"], e["end"] + 1) for e in row["passage"]["entities"])
    names = sorted({passage[start:end] for start, end in spans})
    for query in row["qas"]:
        answers = {answer["text"] for answer in query["answers"]}
        if right := [number for number, name in enumerate(names) if name in answers]:
            yield query["query"], names, right


_BOOLQ = _labelled("{passage}\nQuestion: {question}?\nAnswer:", ["no", "yes"])
_CB = _labelled(
    "{premise}\nQuestion: {hypothesis}. True, False, or Neither?\nAnswer:",
    ["True", "False", "Neither"],
    ["entailment", "contradiction", "neutral"].index,
)
_RTE = _labelled(
    "{premise}\nQuestion: {hypothesis} True or False?\nAnswer:",
    ["True", "False"],
    lambda label: int(label != "entailment"),
)
_WIC = _labelled(
    "{sentence1}\n{sentence2}\nQuestion: Is the word '{word}' used in the same sense in the two "
    "sentences above?\nAnswer:",
    ["no", "yes"],
)
_WSC = _labelled(
    "Passage: {text}\nQuestion: In the passage above, does the pronoun "
    '"{target[span2_text]}" refer to "{target[span1_text]}"?\nAnswer:',
    ["no", "yes"],
)


def _superglue(name: str) -> tuple[str, str]:
    return f"{name}/train.jsonl", f"{name}/val.jsonl"


RANKED: Mapping[str, Ranked] = {
    "boolq": Ranked(_superglue("BoolQ"), _BOOLQ),
    "cb": Ranked(_superglue("CB"), _CB, (MACRO_F1,)),
    "copa": Ranked(_superglue("COPA"), _copa),
    "multirc": Ranked(_superglue("MultiRC"), _multirc, (ANSWER_F1, QUESTION_MATCH)),
    "record": Ranked(
        _superglue("ReCoRD"), _record, (NAME_F1, NAME_MATCH), "", written=_record_written
    ),
    "rte": Ranked(_superglue("RTE"), _RTE),
    "wic": Ranked(_superglue("WiC"), _WIC),
    "wsc": Ranked(_superglue("WSC"), _WSC),
}
"""Tasks by name."""
