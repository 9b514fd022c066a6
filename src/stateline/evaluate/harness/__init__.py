"""Evaluation suites of lm-evaluation-harness on the models of this library.

The package ``lm_eval`` is imported when a suite is run, not before.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stateline.data import Tokenizer
from stateline.errors import InputError, needed, unknown_name
from stateline.evaluate.harness.tasks import LOCAL_TASKS, task_settings
from stateline.models.language_model import LanguageModel
from stateline.settings import at_least

__all__ = ["LOCAL_TASKS", "Chat", "Metric", "check_installed", "run_suite"]

SEED = 1234
"""Seed with which lm-eval draws solved examples by default."""

log = logging.getLogger("stateline.evaluate")


class Metric(NamedTuple):
    """A score on a task.

    Attributes:
        task: Name of the task.
        name: Name of the metric.
        value: The score.
        stderr: Standard error of the mean over examples; ``None`` where it is not known.
        examples: Number of examples.
    """

    task: str
    name: str
    value: float
    stderr: float | None
    examples: int


class Chat(NamedTuple):
    """How tasks are asked by a template of chats.

    Attributes:
        turns: Whether each solved example is a turn of its own; else all are one message.
        system: A message of the system before the first.
    """

    turns: bool = True
    system: str | None = None


def check_installed() -> None:
    """Raise InputError if lm-evaluation-harness is missing."""
    needed("lm_eval", "evaluating on tasks", "eval")


def run_suite(  # noqa: PLR0913 (each is one setting of an evaluation)
    model: LanguageModel,
    tokenizer: Tokenizer,
    names: Sequence[str],
    *,
    data: str | Path | None = None,
    tasks_path: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    rows: int = 8,
    max_length: int | None = None,
    chat: Chat | None = None,
) -> list[Metric]:
    """Score a model on tasks. The tasks in ``LOCAL_TASKS`` read only local files.

    Requests and scores are those of lm-evaluation-harness with its class ``HFLM``, at its default
    seeds. A difference: where a model sets no limit to a text, HFLM takes 2,048 tokens.

    Args:
        model: A language model in evaluation mode; it computes on its own device.
        tokenizer: Its tokenizer.
        names: Tasks: names in ``LOCAL_TASKS``, or of YAML files below ``tasks_path``.
        data: Folder with the files of local tasks.
        tasks_path: Folder with tasks in the format of lm-evaluation-harness. It must be trusted:
            its YAML may name data on a network, and code that is run.
        shots: Solved examples before each question, unless a task wants none: of local tasks the
            first of the training set; by default as many as the task says.
        limit: Use only this many examples of each task.
        rows: Prompts that are read at a time.
        max_length: Longest text that is read, as for :class:`StatelineLM`.
        chat: Ask by the model's template of chats.

    Returns:
        The scores, in the order of the tasks.

    Raises:
        InputError: If lm-eval is not installed, a task is unknown, or its data cannot be read.
    """
    at_least(0, shots=shots, max_length=max_length)
    at_least(1, limit=limit, rows=rows)
    check_installed()
    from lm_eval import evaluator

    from stateline.evaluate.harness.model import StatelineLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tasks = _tasks(tokenizer, names, data, tasks_path)
    for task in tasks.values():  # as by simple_evaluate
        said = task.get_config("num_fewshot")
        if said is None or (shots is not None and said != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=SEED)
    if chat is None and tokenizer.chat_template:
        log.warning("the model is for chats, but tasks are plain text: give --chat_template")
    found = evaluator.evaluate(
        lm=StatelineLM(model, tokenizer, batch_size=rows, max_length=max_length),
        task_dict=tasks,
        limit=limit,
        bootstrap_iters=100,
        log_samples=False,
        apply_chat_template=chat is not None,
        fewshot_as_multiturn=chat is not None and chat.turns,
        system_instruction=None if chat is None else chat.system,
    )
    return [metric for name in tasks for metric in _metrics(name, found)]


def _tasks(
    tokenizer: Tokenizer,
    names: Sequence[str],
    data: str | Path | None,
    tasks_path: str | Path | None,
) -> dict[str, Any]:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    extra: Any = None
    if tasks_path is not None:
        if not Path(tasks_path).is_dir():
            raise InputError(f"there is no folder {tasks_path}: give one with tasks in YAML")
        extra = TaskManager(include_path=str(tasks_path), include_defaults=False)
    tasks: dict[str, Any] = {}
    for name in names:
        if extra is not None and name in extra.all_tasks:
            tasks |= extra.load([name])["tasks"]
        elif name in LOCAL_TASKS:
            tasks[name] = ConfigurableTask(config=task_settings(name, data, tokenizer))
        else:
            raise unknown_name("task", name, [*LOCAL_TASKS, *(extra.all_tasks if extra else [])])
    return tasks


def _metrics(task: str, found: Any) -> list[Metric]:
    """The scores of a task; their keys are ``metric,filter``."""
    values, examples = found["results"][task], found["n-samples"][task]["effective"]
    metrics = []
    for key, value in values.items():
        name, comma, kind = key.partition(",")
        if comma and not name.endswith("_stderr"):
            stderr = values.get(f"{name}_stderr,{kind}")
            known = isinstance(stderr, float) and stderr == stderr
            metrics.append(Metric(task, name, float(value), stderr if known else None, examples))
    return metrics
