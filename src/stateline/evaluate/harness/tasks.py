"""Tasks from local files: SuperGLUE by ranking and by generation, LAMBADA, WikiText.

A question is a text with a list of possible answers. *Ranking* takes the answer that the model
finds most likely. *Generation* lets the model write, and takes the answer with which the text
begins.

References:
    Fu et al., "Hungry Hungry Hippos", 2023, appendix F.7 (generation); Paperno et al., "The LAMBADA
    dataset", 2016; Merity et al., "Pointer Sentinel Mixture Models", 2016 (WikiText).
"""

import re
import string
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from stateline.data import Tokenizer
from stateline.errors import InputError, check_choice
from stateline.evaluate.harness.superglue import RANKED, Problem, Question, Ranked
from stateline.files import parse_json_object, read_text, user_path

T = TypeVar("T")

_WRITTEN = (
    ("s '", "s'"),
    *((f" @{re.escape(mark)}@ ", mark) for mark in "-,."),
    *((f" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    *((rf"\{a}\s*([^\{b}]*?)\s*\{b}", rf"{a}\1{b}") for a, b in ("()", "[]", "{}", '""', "''")),
    ("(?<==) (?==)", ""),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
"""What tokens of WikiText are replaced by, one after the other."""

LAMBADA, WIKITEXT = "lambada/test.jsonl", "wikitext-2/test.txt"

LOCAL_TASKS: Mapping[str, str] = {
    **{name: " and ".join(task.files) for name, task in RANKED.items()},
    **{f"{name}_gen": " and ".join(task.files) for name, task in RANKED.items()},
    "lambada": LAMBADA,
    "wikitext": WIKITEXT,
}
"""Names of tasks, and the files below the folder of data that each needs."""


def task_settings(name: str, data: str | Path | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """The settings of a local task; the tokenizer tells how long written answers may be."""
    check_choice("task", name, LOCAL_TASKS)
    if data is None:
        raise InputError(f"{name} is read from {LOCAL_TASKS[name]}: give their folder with --data")
    folder = user_path(data, "data folder")
    if name == "lambada":
        return _lambada(folder)
    if name == "wikitext":
        return _wikitext(folder)
    return _ranked(name, RANKED[name.removesuffix("_gen")], folder, tokenizer)


def _ranked(name: str, task: Ranked, data: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    writes = name.endswith("_gen")
    parse = task.written if writes and task.written else task.questions

    def checked(row: Problem) -> Iterator[Question]:
        for question in parse(row):
            if not all(0 <= number < len(question.choices) for number in question.right):
                raise ValueError(f"answer {question.right} of {len(question.choices)}")
            yield question

    splits = {
        split: [question._asdict() for question in _read(data / file, checked)]
        for split, file in zip(("train", "validation"), task.files, strict=True)
    }
    delimiter = " " if writes else task.delimiter
    measures = [_metric(measure.name, measure.combine) for measure in task.measures]
    settings = {
        **_base(name, splits),
        "training_split": "train",
        "validation_split": "validation",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "doc_to_text": lambda row: row["text"],
        "target_delimiter": delimiter,
        "metric_list": [_metric("acc", "mean"), *measures],
    }
    if not writes:
        return settings | {
            "output_type": "multiple_choice",
            "doc_to_choice": lambda row: row["choices"],
            "doc_to_target": lambda row: row["right"][0],
            "process_results": lambda row, found: _scores(task, row, _likeliest(found)),
        }
    answers = {choice for row in splits["validation"] for choice in row["choices"]}
    longest = max(len(tokenizer.encode(delimiter + answer)) for answer in answers)
    return settings | {
        "output_type": "generate_until",
        "doc_to_target": lambda row: row["choices"][row["right"][0]],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": longest + 1, "do_sample": False},
        "process_results": lambda row, found: _scores(task, row, _written(row, found[0])),
    }


def _scores(task: Ranked, row: Problem, chosen: int | None) -> dict[str, Any]:
    """The values of accuracy and of the task's measures for a question."""
    values = {measure.name: measure.value(row, chosen) for measure in task.measures}
    return {"acc": float(chosen in row["right"]), **values}


def _likeliest(results: list[tuple[float, bool]]) -> int:
    """The number of the likeliest answer; the first one among equals."""
    likelihoods = [likelihood for likelihood, _ in results]
    return likelihoods.index(max(likelihoods))


def _written(row: Problem, text: str) -> int | None:
    """The number of the longest answer whose words begin a text; ``None`` if there is none.

    Case, punctuation and spaces do not count. Among equally long answers, a right one is taken.
    """
    words, found = _words(text), []
    for number, choice in enumerate(row["choices"]):
        answer = _words(choice)
        if words[: len(answer)] == answer:
            found.append((len(answer), number in row["right"], number))
    return max(found)[2] if found else None


def _words(text: str) -> list[str]:
    return text.lower().translate(str.maketrans("", "", string.punctuation)).split()


def _lambada(data: Path) -> dict[str, Any]:
    def last_word(row: Problem) -> Iterator[dict[str, str]]:
        text, _, word = row["text"].rpartition(" ")
        yield {"text": text, "word": f" {word}"}

    rows = list(_read(data / LAMBADA, last_word))
    return {
        **_base("lambada", {"test": rows}),
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": lambda row: row["text"],
        "doc_to_target": lambda row: row["word"],
        "metric_list": [_metric("perplexity", "perplexity", higher=False), _metric("acc", "mean")],
    }


def _wikitext(data: Path) -> dict[str, Any]:
    articles: list[list[str]] = [[]]
    for line in read_text(data / WIKITEXT, "text").split("\n"):
        if re.fullmatch(r"= [^=].* =", line.strip()):
            articles.append([])
        articles[-1].append(line)
    rows = [{"page": page} for page in map("\n".join, articles) if page.strip()]
    by = {"word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity"}
    by["bits_per_byte"] = "bits_per_byte"
    return {
        **_base("wikitext", {"test": rows}),
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": lambda row: detokenised(row["page"]),
        "process_results": _score_article,
        "metric_list": [_metric(name, how, higher=False) for name, how in by.items()],
    }


def detokenised(page: str) -> str:
    """A page of WikiText as it is written: what lm-evaluation-harness scores.

    Example:
        >>> detokenised("It is 2 @.@ 5 m ( 8 ft ) long , the king 's own .")
        "It is 2.5 m (8 ft) long, the king's own ."
    """
    for pattern, written in _WRITTEN:
        page = re.sub(pattern, written, page)
    return page


def _score_article(row: Problem, results: list[float]) -> dict[str, tuple[float, int]]:
    """Log-likelihoods, to be divided by words and by bytes of the page as it is in the file."""
    (likelihood,), words = results, len(re.split(r"\s+", row["page"]))
    size = (likelihood, len(row["page"].encode()))
    return {"word_perplexity": (likelihood, words), "byte_perplexity": size, "bits_per_byte": size}


def _base(name: str, splits: Mapping[str, list[Any]]) -> dict[str, Any]:
    def dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {split: Dataset.from_list(rows) for split, rows in splits.items()}

    return {"task": name, "custom_dataset": dataset, "metadata": {"version": 1.0}}


def _metric(name: str, how: object, *, higher: bool = True) -> dict[str, Any]:
    return {"metric": name, "aggregation": how, "higher_is_better": higher}


def _read(path: Path, parse: Callable[[Problem], Iterator[T]]) -> Iterator[T]:
    """The rows of a file with one JSON object per line."""
    n = 0
    for number, line in enumerate(read_text(path, "data of a task").split("\n"), start=1):
        if not line.strip():
            continue
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
