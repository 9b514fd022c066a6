"""One run of a comparison: train and score a model, or time it, and keep the result."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stateline.bench.speed import decode_tokens_per_second, train_tokens_per_second
from stateline.capacity import longest_copy, measure
from stateline.compare.jobs import Job, digest, slug
from stateline.data.tokenizer import FILE
from stateline.errors import InputError
from stateline.evaluate import accuracy_by_position, evaluate, loss_by_position
from stateline.files import write_text
from stateline.generate import Sampling, generate
from stateline.models.checkpoint import save_model
from stateline.models.language_model import LanguageModel
from stateline.models.make import make_model
from stateline.models.size import count_parameters, meta_model
from stateline.tasks import CorpusTask, GeneratedTask, LabelledTask, Task, make_task
from stateline.train.checkpoint import found, whole_weights
from stateline.train.loop import ALONE, check_carried_state, train
from stateline.train.metrics import Metrics, TrainingDiverged
from stateline.train.processes import Processes

EVAL_BATCHES = 16
"""Batches of fresh problems behind each final score of a task that is not a text."""

SAMPLE_PROMPT, SAMPLE_TOKENS = 64, 256
"""Tokens of held-out text that a sample begins with, and that the model adds."""

SPEED_LENGTHS = (256, 1024)
"""Tokens in a training row; tokens in the state when decoding is timed."""

STATE_LENGTHS = (256, 1024, 4096, 16384, 65536)
"""Tokens after which the state is weighed, and lengths at which operations are counted."""

Results = dict[str, Any]


def run_job(
    job: Job,
    folder: Path,
    on_log: Callable[[Metrics], None],
    *,
    processes: Processes = ALONE,
    interrupted: Callable[[], bool] = lambda: False,
) -> Results:
    """Train and score one model; its files appear in ``folder``, the result last.

    Args:
        job: What to train on what.
        folder: Where; a run that lies there unfinished is continued.
        on_log: Called with every line of metrics.
        processes: Those that share the work; each calls this function.
        interrupted: Asked after every update; if it says so, the run is saved and stops.

    Returns:
        The result; its ``stopped`` is ``interrupted`` if it is not yet one.
    """
    task = make_task(job.task, seed=job.training.seed)
    check_job(job, task)
    torch.manual_seed(job.training.seed)
    model = make_model(job.model).to(processes.device)
    if isinstance(task, CorpusTask) and not found(folder):  # a run that goes on has its own
        processes.on_main(partial(task.tokenizer.save, folder / FILE))
    run: Results = {
        "model": job.model.pattern,
        "task": job.task,
        "seed": job.training.seed,
        "d_model": job.model.d_model,
        "parameters": count_parameters(job.model),
        "parameters_wanted": job.parameters_wanted,
    }
    try:
        result = train(
            model,
            task,
            job.training,
            folder=folder,
            run={"task": job.task, "model": dataclasses.asdict(job.model), "data": job.data},
            processes=processes,
            on_log=on_log,
            interrupted=interrupted,
        )
    except TrainingDiverged as error:
        scores = {str(length): {task.metric: None} for length in task.eval_lengths}
        run |= {"stopped": str(error), "steps": error.steps, "seconds": 0.0, "curve": []}
        run |= {"tokens_per_second": 0.0, "steps_to_solve": None, "by_length": scores}
    else:
        run |= {"stopped": result.stopped, "steps": result.steps}
        if result.stopped == "interrupted":
            return run
        batches = 0 if isinstance(task, CorpusTask) else EVAL_BATCHES
        run |= {
            "seconds": result.seconds,
            "tokens_per_second": result.tokens / result.seconds,
            "steps_to_solve": result.steps_to_solve,
            "curve": [{"step": m.step, "loss": m.loss, "metric": m.metric} for m in result.curve],
            "by_length": {
                str(length): evaluate(model, task, length, batches=batches)
                for length in task.eval_lengths
            },
        }
        if isinstance(model, LanguageModel):
            run |= _details(model, task) | _capacity(model, task, run["by_length"])
        weights = whole_weights(model)
        if processes.main:
            save_model(model, folder, weights=weights)
    run |= {
        "training": dataclasses.asdict(job.training),
        "environment": processes.environment(),
    }
    if processes.main:
        write_text(folder / "result.json", json.dumps(run))
    return run


def check_job(job: Job, task: Task) -> None:
    """Raise InputError if a job would fail after it has begun: before anything is written."""
    if isinstance(task, GeneratedTask):
        for length in task.eval_lengths:
            task.problems(length, 0)  # not every length has some
    _check_positions(task, job.model.max_len)
    check_carried_state(meta_model(job.model), task, job.training)


def _check_positions(task: Task, limit: int | None) -> None:
    """Raise InputError unless learned positions reach over all that a task will ask for."""
    if limit is None:
        return
    wanted = [task.train_batch(0).tokens.shape[1]]
    for length in task.eval_lengths:
        if isinstance(task, GeneratedTask):
            prompts, answers = task.problems(length, 0)
            wanted.append(prompts.shape[1] + answers.shape[1] - 1)
        else:
            wanted.append(length)
    if max(wanted) > limit:
        raise InputError(
            f"the task is trained and scored at up to {max(wanted)} tokens, more than the learned "
            f"positions reach: set max_len (now {limit}) to at least that"
        )


def _details(model: LanguageModel, task: Task) -> Results:
    """What a run on a task of this kind has beside its scores."""
    details: Results = {}
    if isinstance(task, CorpusTask):
        details["sample"] = _sample(model, task)
    if places := _by_position(model, task):
        details["by_position"] = {str(end): score for end, score in places.items()}
    return details


def _capacity(model: LanguageModel, task: Task, by_length: Results) -> Results:
    """How the score at the training length depends on the precision of the state, if it is solved.

    Of a model that has learned nothing no bit is needed, which says nothing.
    """
    if not isinstance(task, GeneratedTask):
        return {}
    score = by_length[str(task.train_length)][task.metric]
    if task.solved_at is not None and score < task.solved_at:
        return {}
    found = measure(model, task, task.train_length)
    by_bits = {str(bits): score for bits, score in found.by_bits.items()}
    return {"capacity": {"numbers": found.numbers, "needed": found.needed, "by_bits": by_bits}}


def _by_position(model: LanguageModel, task: Task) -> dict[int, float]:
    """The score by position at the longest length; nothing where a position means nothing."""
    length = task.eval_lengths[-1]
    if isinstance(task, CorpusTask):
        return loss_by_position(model, task, length)
    if isinstance(task, LabelledTask):
        return accuracy_by_position(model, task, length, batches=EVAL_BATCHES)
    return {}


def _sample(model: LanguageModel, task: CorpusTask) -> str:
    """The beginning of the held-out text, and how the model goes on."""
    limit = model.max_len or SAMPLE_PROMPT + SAMPLE_TOKENS
    prompt = next(task.held_out(min(SAMPLE_PROMPT, limit))).tokens[:1]
    prompt, room = prompt.to(model.embedding.weight.device), limit + 1 - prompt.shape[1]
    tokens = generate(model, prompt, min(SAMPLE_TOKENS, room), sampling=Sampling(temperature=0.8))
    text = task.tokenizer.decode(torch.cat([prompt, tokens], dim=1)[0].tolist())
    return text.encode(errors="surrogateescape").decode(errors="replace")


def time_job(job: Job, folder: Path) -> Results:
    """Speed, state size and operations of one model, measured now or before."""
    path = folder / "speed" / f"{slug(job.model.pattern)}--{digest(job.model)}"
    if (entry := stored(path)) is not None:
        return entry
    torch.manual_seed(0)
    model, counted = make_model(job.model), meta_model(job.model)
    entry = {
        "model": job.model.pattern,
        "task": job.task,
        "d_model": job.model.d_model,
        "parameters": count_parameters(job.model),
        "train_tokens_per_second": {n: train_tokens_per_second(model, n) for n in SPEED_LENGTHS},
        "decode_tokens_per_second": {n: decode_tokens_per_second(model, n) for n in SPEED_LENGTHS},
        "state_bytes": {n: counted.state_bytes(n) for n in STATE_LENGTHS},
        "flops_per_token": {n: counted.flops_per_token(n) for n in STATE_LENGTHS},
    }
    if isinstance(counted, LanguageModel):
        entry["longest_copy"] = longest_copy(counted)
    write_text(path / "result.json", json.dumps(entry))
    return json.loads(json.dumps(entry))  # keys as text, as in the file


def stored(folder: Path) -> Results | None:
    """Result of an earlier run, if it is there and whole."""
    try:
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
