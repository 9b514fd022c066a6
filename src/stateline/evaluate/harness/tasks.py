"""Tasks from local files: SuperGLUE by ranking and by generation, LAMBADA, WikiText.

A question is a text with a list of possible answers. *Ranking* takes the answer that the model
finds most likely. *Generation* lets the model write the answer and compares texts.

References:
    Wang et al., "SuperGLUE", 2019; Paperno et al., "The LAMBADA dataset", 2016; Merity et al.,
    "Pointer Sentinel Mixture Models", 2016 (WikiText). The questions are worded as in Brown et al.,
    "Language Models are Few-Shot Learners", 2020, appendix G, where a task is in it.
"""

import re
import string
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stateline.data import Tokenizer
from stateline.errors import InputError, unknown_name
from stateline.files import parse_json_object, regular_file

Row = Mapping[str, Any]
T = TypeVar("T")


class Question(NamedTuple):
    """A question with its possible answers and the numbers of those that are right."""

    text: str
    choices: list[str]
    right: list[int]


class Ranked(NamedTuple):
    """A task of questions.

    Attributes:
        files: Files with examples to learn from and to score, below the folder of data.
        questions: The questions that one row of a file holds.
        delimiter: What stands between a question and its answer.
    """

    files: tuple[str, str]
    questions: Callable[[Row], Iterator[Question]]
    delimiter: str = " "


def _one_of(choices: list[str], right: int, text: str) -> Iterator[Question]:
    yield Question(text, choices, [right])


def _boolq(row: Row) -> Iterator[Question]:
    text = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return _one_of(["no", "yes"], int(row["label"]), text)


def _cb(row: Row) -> Iterator[Question]:
    text = f"{row['premise']}\nQuestion: {row['hypothesis']}. True, False, or Neither?\nAnswer:"
    right = ["entailment", "contradiction", "neutral"].index(row["label"])
    return _one_of(["True", "False", "Neither"], right, text)


def _copa(row: Row) -> Iterator[Question]:
    joint = "because" if row["question"] == "cause" else "therefore"
    choices = [choice[:1].lower() + choice[1:] for choice in (row["choice1"], row["choice2"])]
    return _one_of(choices, int(row["label"]), f"{row['premise'].strip()[:-1]} {joint}")


def _multirc(row: Row) -> Iterator[Question]:
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            text = (
                f"{row['passage']['text']}\nQuestion: {question['question']}\n"
                f"Answer: {answer['text']}\nIs the answer right?"
            )
            yield from _one_of(["no", "yes"], int(answer["label"]), text)


def _record(row: Row) -> Iterator[Question]:
    passage = row["passage"]["text"]
    spans = ((e["start"], e["end"] + 1) for e in row["passage"]["entities"])
    names = sorted({passage[start:end] for start, end in spans})
    for query in row["qas"]:
        answers = {answer["text"] for answer in query["answers"]}
        right = [number for number, name in enumerate(names) if name in answers]
        choices = [query["query"].replace("@placeholder", name) for name in names]
        if right:
            yield Question(passage.replace("@highlight", "-") + "\n", choices, right)


def _rte(row: Row) -> Iterator[Question]:
    text = f"{row['premise']}\nQuestion: {row['hypothesis']} True or False?\nAnswer:"
    return _one_of(["True", "False"], int(row["label"] != "entailment"), text)


def _wic(row: Row) -> Iterator[Question]:
    text = (
        f"{row['sentence1']}\n{row['sentence2']}\nQuestion: Is the word '{row['word']}' used in "
        "the same sense in the two sentences above?\nAnswer:"
    )
    return _one_of(["no", "yes"], int(row["label"]), text)


def _wsc(row: Row) -> Iterator[Question]:
    target = row["target"]
    text = (
        f"Passage: {row['text']}\nQuestion: In the passage above, does the pronoun "
        f'"{target["span2_text"]}" refer to "{target["span1_text"]}"?\nAnswer:'
    )
    return _one_of(["no", "yes"], int(row["label"]), text)


def _superglue(name: str) -> tuple[str, str]:
    return f"{name}/train.jsonl", f"{name}/val.jsonl"


RANKED: Mapping[str, Ranked] = {
    "boolq": Ranked(_superglue("BoolQ"), _boolq),
    "cb": Ranked(_superglue("CB"), _cb),
    "copa": Ranked(_superglue("COPA"), _copa),
    "multirc": Ranked(_superglue("MultiRC"), _multirc),
    "record": Ranked(_superglue("ReCoRD"), _record, delimiter=""),
    "rte": Ranked(_superglue("RTE"), _rte),
    "wic": Ranked(_superglue("WiC"), _wic),
    "wsc": Ranked(_superglue("WSC"), _wsc),
}

LAMBADA, WIKITEXT = "lambada/test.jsonl", "wikitext-2/test.txt"

LOCAL_TASKS: Mapping[str, str] = {
    **{name: " and ".join(task.files) for name, task in RANKED.items()},
    **{f"{name}_gen": " and ".join(task.files) for name, task in RANKED.items()},
    "lambada": LAMBADA,
    "wikitext": WIKITEXT,
}
"""Names of tasks, and the files below the folder of data that each needs."""


def task_settings(name: str, data: str | Path | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """The settings of a local task, for lm-evaluation-harness.

    Args:
        name: One of ``LOCAL_TASKS``.
        data: Folder with the task's files.
        tokenizer: Tokenizer of the model, which limits the length of written answers.

    Raises:
        InputError: If the task is unknown, or a file is missing or damaged.
    """
    if name not in LOCAL_TASKS:
        raise unknown_name("task", name, LOCAL_TASKS)
    if data is None:
        raise InputError(f"{name} is read from {LOCAL_TASKS[name]}: give their folder with --data")
    if name == "lambada":
        return _lambada(Path(data))
    if name == "wikitext":
        return _wikitext(Path(data))
    return _ranked(name, RANKED[name.removesuffix("_gen")], Path(data), tokenizer)


def _ranked(name: str, task: Ranked, data: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    splits = {
        split: [question._asdict() for question in _read(data / file, task.questions)]
        for split, file in zip(("train", "validation"), task.files, strict=True)
    }
    settings = {
        **_base(name, splits),
        "training_split": "train",
        "validation_split": "validation",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "doc_to_text": lambda row: row["text"],
        "target_delimiter": task.delimiter,
        "metric_list": [_mean("acc")],
    }
    if not name.endswith("_gen"):
        return settings | {
            "output_type": "multiple_choice",
            "doc_to_choice": lambda row: row["choices"],
            "doc_to_target": lambda row: row["right"][0],
            "process_results": _score_ranking,
        }
    answers = {choice for row in splits["validation"] for choice in row["choices"]}
    longest = max(len(tokenizer.encode(task.delimiter + answer)) for answer in answers)
    return settings | {
        "output_type": "generate_until",
        "doc_to_target": lambda row: row["choices"][row["right"][0]],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": longest + 1, "do_sample": False},
        "process_results": _score_writing,
    }


def _score_ranking(row: Row, results: list[tuple[float, bool]]) -> dict[str, float]:
    """Whether the likeliest answer is right; the first one among equals."""
    likelihoods = [likelihood for likelihood, _ in results]
    return {"acc": float(likelihoods.index(max(likelihoods)) in row["right"])}


def _score_writing(row: Row, results: list[str]) -> dict[str, float]:
    """Whether the text is a right answer, apart from case, punctuation and spaces around it."""
    right = {_plain(row["choices"][number]) for number in row["right"]}
    return {"acc": float(_plain(results[0]) in right)}


def _plain(text: str) -> str:
    return text.lower().translate(str.maketrans("", "", string.punctuation)).strip()


def _lambada(data: Path) -> dict[str, Any]:
    def last_word(row: Row) -> Iterator[dict[str, str]]:
        text, _, word = row["text"].rpartition(" ")
        yield {"text": text, "word": f" {word}"}

    rows = list(_read(data / LAMBADA, last_word))
    perplexity = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
    return {
        **_base("lambada", {"test": rows}),
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": lambda row: row["text"],
        "doc_to_target": lambda row: row["word"],
        "metric_list": [perplexity, _mean("acc")],
    }


def _wikitext(data: Path) -> dict[str, Any]:
    file = regular_file(data / WIKITEXT, "text")
    articles = [""]
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if re.fullmatch(r"= [^=].* =", line.strip()):
            articles.append("")
        articles[-1] += line
    rows = [{"page": article} for article in articles if article.strip()]
    names = ("word_perplexity", "byte_perplexity")
    metrics = [
        {"metric": name, "aggregation": "weighted_perplexity", "higher_is_better": False}
        for name in names
    ]
    bits = {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}
    return {
        **_base("wikitext", {"test": rows}),
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": lambda row: row["page"],
        "process_results": _score_article,
        "metric_list": [*metrics, bits],
    }


def _score_article(row: Row, results: list[float]) -> dict[str, tuple[float, int]]:
    """Log-likelihoods, to be divided by words and by bytes of the text."""
    (likelihood,), words = results, len(re.split(r"\s+", row["page"]))
    size = (likelihood, len(row["page"].encode()))
    return {
        "word_perplexity": (likelihood, words),
        "byte_perplexity": size,
        "bits_per_byte": size,
    }


def _base(name: str, splits: Mapping[str, list[Any]]) -> dict[str, Any]:
    def dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {split: Dataset.from_list(rows) for split, rows in splits.items()}

    return {"task": name, "custom_dataset": dataset, "metadata": {"version": 1.0}}


def _mean(metric: str) -> dict[str, Any]:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def _read(path: Path, parse: Callable[[Row], Iterator[T]]) -> Iterator[T]:
    """What the rows of a file with one JSON object per line hold."""
    regular_file(path, "data of a task")
    n = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            row = parse_json_object(line, f"line {number} of {path}")
            try:
                found = list(parse(row))
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise InputError(
                    f"line {number} of {path} is no example of this task ({error!r}): get the "
                    "official file"
                ) from error
            yield from found
            n += len(found)
    if not n:
        raise InputError(f"{path} holds no example: get the official file")
