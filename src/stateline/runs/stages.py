"""Distillation in stages: each is a run, which starts from the model of the stage before."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from stateline.errors import InputError, check_choice
from stateline.files import check_writable, read_json_object, to_yaml, write_text
from stateline.generate.hugging_face import HUGGING_FACE
from stateline.generate.runs import load_any_run, read_model_config, weights_hash
from stateline.models.config import ModelConfig
from stateline.models.factory import meta_model
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters
from stateline.models.starts import replaced
from stateline.pattern import parse_pattern
from stateline.runs.folder import RESULT, stored_run
from stateline.runs.initial import places, settings_of
from stateline.runs.job import Job
from stateline.runs.results import TEACHER, Results, RunRecord, to_json
from stateline.runs.single import CONFIG, run_single, single_job
from stateline.runs.speed import Detail, time_jobs
from stateline.runs.store import outline, write_results
from stateline.runs.train import scored_as_it_is
from stateline.tasks import Task, Tokens
from stateline.train.config import TrainConfig
from stateline.train.loop import ALONE
from stateline.train.metrics import COMPLETE, Metrics
from stateline.train.processes import Processes

TASK = "task"
"""Name of the stage that learns the task's own loss, without a teacher."""

RATES = {
    "mixing": 1e-3,
    "outputs": 1e-3,
    "squares": 1e-3,
    "blocks": 1e-4,
    "logits": 1e-5,
    TASK: 1e-5,
}
"""Highest learning rate of each stage where none is given: those of MOHAWK and RADLADS. LoLCATs'
0.01 for ``squares`` is for feature maps alone: the first update of AdamW moves each weight by its
rate."""

STAGES = tuple(RATES)
"""Names of stages: what is compared with the teacher, or ``task``."""

SCORED = 2**40
"""Weights of the teacher times tokens of the text that are scored."""

FEWEST = 4096
"""Fewest tokens that are scored."""

TIMED = 2**25
"""Most weights of a teacher beside which a student is timed on a CPU by default."""

START = "start.json"
"""Name of the file with hashes of what a stage began from."""


class Stage(NamedTuple):
    """A stage.

    Attributes:
        name: One of ``STAGES``.
        train: Settings of its training.
        in_turn: Whether replaced layers are trained one after the other, each as a run, so that
            memory holds the gradients and moments of one layer.
    """

    name: str
    train: Mapping[str, Any]
    in_turn: bool = False


def read_stages(text: str) -> list[Stage]:
    """Stages as a pattern: names with settings of their training.

    Raises:
        InputError: If the text names something else.

    Example:
        >>> read_stages("outputs(steps=500, in_turn=true) logits")
        [Stage(name='outputs', train={'steps': 500}, in_turn=True), Stage(name='logits', \
train={}, in_turn=False)]
    """
    known = {field.name for field in dataclasses.fields(TrainConfig)} - {"teacher", "match"}
    stages = []
    for item in parse_pattern(text):
        check_choice("stage", item.name, STAGES)
        if item.core or item.repeat > 1:
            raise InputError(
                f"a stage has settings alone, as in {item.name}(steps=500), got {text!r:.80}"
            )
        train = dict(item.keywords)
        in_turn = train.pop("in_turn", False)
        if not isinstance(in_turn, bool) or (in_turn and item.name in ("logits", TASK)):
            raise InputError(
                f"in_turn is true or false, and for stages that train single layers, got "
                f"{item.name}(in_turn={in_turn})"
            )
        for name in train:
            check_choice(f"setting of {item.name}", name, [*known, "in_turn"])
        stages.append(Stage(item.name, train, in_turn))
    return stages


class Step(NamedTuple):
    """A run of a stage.

    Attributes:
        folder: Its folder.
        job: What it trains.
        recipe: How to train it again, in YAML.
    """

    folder: Path
    job: Job
    recipe: str


class Done(NamedTuple):
    """A run of a stage, and its result."""

    folder: Path
    job: Job
    run: RunRecord


@dataclasses.dataclass(frozen=True)
class Distilling:
    """How a student is made from its teacher.

    Attributes:
        teacher: Folder of the teacher; with ``hf:``, transformers gives its logits.
        pattern: The layers of the student, in the places of the teacher's.
        spec: The task with the text, such as ``tokens(path=books)``.
        task: The same, with seed 0.
        stages: The stages, in order.
        train: Settings of training for all stages, which those of a stage override.
        model: Settings of the student that differ from the teacher's.
        folder: Folder of all runs.
        name: Name of the student in results; by default its pattern.
    """

    teacher: str
    pattern: str
    spec: str
    task: Task
    stages: Sequence[Stage]
    train: Mapping[str, Any]
    model: Mapping[str, Any]
    folder: Path
    name: str = ""

    @property
    def start(self) -> str:
        """Folder of the teacher's weights."""
        return self.teacher.removeprefix(HUGGING_FACE)

    def steps(self) -> Iterator[Step]:
        """The runs; the model that one starts from must exist when the next is asked for.

        Raises:
            InputError: If there are no stages, or one cannot train the student.
        """
        if not self.stages:
            raise InputError("distillation needs a stage, such as outputs or logits")
        init = self.start
        for number, stage in enumerate(self.stages, start=1):
            name = f"{number}-{stage.name}"
            for layer, block in self._layers().items() if stage.in_turn else [(None, None)]:
                own = name if layer is None else f"{name}-layer-{layer}"
                yield self._step(stage, init, self.folder / own, block)
                init = str(self.folder / own)

    def check(self) -> None:
        """Check the settings of all stages, and the student, before anything is computed.

        Raises:
            InputError: If one cannot be used.
        """
        if self.name == TEACHER:
            raise InputError(f"a student needs another name than {TEACHER}, got {self.name}=...")
        for stage in self.stages:
            self._training(stage)
        next(self.steps(), None)

    def _training(self, stage: Stage) -> TrainConfig:
        train = {**self.task.training, "lr": RATES[stage.name], **self.train, **stage.train}
        if stage.name != TASK:
            native = stage.name != "logits"
            train |= {"match": stage.name, "teacher": self.start if native else self.teacher}
        return TrainConfig(**train)

    def _step(self, stage: Stage, init: str, folder: Path, block: int | None) -> Step:
        model = {**settings_of(read_model_config(init)), **self.model}
        training = self._training(stage)
        if block is not None:
            others = [f"stack.layers.{n}.*" for n in self._layers().values() if n != block]
            frozen = " ".join(filter(None, [training.freeze, *others]))
            training = dataclasses.replace(training, freeze=frozen)
        job = single_job(
            self.task, self.spec, self.pattern, model=model, training=training, init=init
        )
        recipe = to_yaml(
            {"pattern": self.pattern, "init": init, "task": self.spec, "model": model}
            | {"train": dataclasses.asdict(training)}
        )
        return Step(folder, dataclasses.replace(job, alias=self.name), recipe)

    def _layers(self) -> dict[int, int]:
        """The blocks whose layers replace others, by the numbers of the layers in the pattern."""
        source = read_model_config(self.start)
        models = [meta_model(config) for config in (self._config(source), source)]
        student, teacher = models
        assert isinstance(student, LanguageModel)
        assert isinstance(teacher, LanguageModel)
        mixers = [n for n, branches in enumerate(places(source)) if not all(branches)]
        return {mixers.index(block): block for block, *_ in replaced(student, teacher)}

    def _config(self, source: ModelConfig) -> ModelConfig:
        return dataclasses.replace(source, pattern=self.pattern)

    def teacher_job(self) -> Job:
        """The teacher as a job without updates, to be scored beside its student."""
        config = read_model_config(self.start)
        training = TrainConfig(**{**self.task.training, **self.train})
        size = count_parameters(config)
        return Job(self.spec, size, config, training, init=self.start, alias=TEACHER)


def scored_tokens(teacher: str) -> int:
    """How many tokens of a text are scored by default: fewer for large teachers.

    Args:
        teacher: Folder of the teacher's weights.
    """
    size = count_parameters(read_model_config(teacher))
    return min(Tokens.held_out_tokens, max(FEWEST, SCORED // size))


def default_timing(teacher: str, device: torch.device) -> Detail:
    """What is timed by default: nothing on a CPU if the teacher in a folder is large."""
    small = count_parameters(read_model_config(teacher)) <= TIMED
    return "short" if small or device.type != "cpu" else "none"


def distil(
    plan: Distilling,
    *,
    command: str = "",
    processes: Processes = ALONE,
    on_log: Callable[[Job, Metrics], None] = lambda *_: None,
    interrupted: Callable[[], bool] = lambda: False,
    tell: Callable[[str], object] = lambda _: None,
) -> list[Done]:
    """Run all stages, or those that are missing.

    Args:
        plan: What to do.
        command: The command that repeats it, for the record.
        processes: The processes that share the work; each calls this function.
        on_log: Called with every line of metrics.
        interrupted: Called after every update and between final scores; if it returns true, the
            run is saved and stops.
        tell: Called with lines that tell what begins.

    Returns:
        Each run and its result; the last may be interrupted or have diverged.

    Raises:
        InputError: If a stage cannot be used, or a folder holds another run.
    """
    done = list[Done]()
    for step in plan.steps():
        check_writable(step.folder / RESULT)
        processes.on_main(partial(_check_start, step))
        run = stored_run(step.folder)
        training = dataclasses.asdict(step.job.training)
        if run is None or run.stopped not in COMPLETE or run.training != training:
            run = run_single(
                step.job,
                step.folder,
                task=plan.task,
                resume=(step.folder / CONFIG).exists(),
                recipe=step.recipe,
                command=command,
                processes=processes,
                on_log=partial(on_log, step.job),
                interrupted=interrupted,
                tell=tell,
            )
        else:
            tell(f"{step.folder}: done before")
        done.append(Done(step.folder, step.job, run))
        if run.stopped not in COMPLETE:
            break
    return done


def _check_start(step: Step) -> None:
    """Raise InputError if the run in a step's folder began from something else than it would now.

    The stages before may have been trained further, and the teacher or the texts may have changed.
    """
    job, path = step.job, step.folder / START
    now = {"model": weights_hash(job.init), "teacher": job.teacher, "data": job.data}
    before = read_json_object(path, "start of a stage") if path.exists() else now
    for name, value in now.items():
        if before.get(name) != value:
            raise InputError(
                f"the stage in {step.folder} has begun from another {name} than it would now: "
                "delete its folder and those of later stages, or choose another with --out"
            )
    step.folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(now) + "\n")


def student_record(done: Sequence[Done]) -> RunRecord:
    """The student, with the updates and the time of all stages."""
    runs = [one.run for one in done]
    seconds = sum(run.seconds for run in runs)
    tokens = sum(run.tokens_per_second * run.seconds for run in runs)
    speed = tokens / seconds if seconds else 0.0
    return replace(
        runs[-1], steps=sum(run.steps for run in runs), seconds=seconds, tokens_per_second=speed
    )


def teacher_record(
    plan: Distilling,
    processes: Processes = ALONE,
    tell: Callable[[str], object] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> RunRecord:
    """The teacher's scores on the task of its student; they are kept in its own folder.

    All processes call it.

    Args:
        plan: What is done.
        processes: The processes that share the work.
        tell: Called with lines that tell what begins, and how long it took: the student is scored
            in the same way.
        interrupted: Called between scores; if it returns true, the record says so and is not kept.
    """
    path = plan.folder / TEACHER
    found = stored_run(path)
    if found is None or found.task != plan.spec:
        tell("scoring the teacher")
        begun, job = time.perf_counter(), plan.teacher_job()
        model = load_any_run(plan.start, device=processes.device)
        found = scored_as_it_is(job, plan.task, model, processes, interrupted)
        if found.stopped not in COMPLETE:
            return found
        if processes.main:
            write_text(path / RESULT, to_json(found))
        minutes = (time.perf_counter() - begun) / 60
        tell(f"the teacher is scored, in {minutes:.1f} minutes; so is the student after each stage")
    return found


def write_report(
    plan: Distilling,
    done: Sequence[Done],
    teacher: RunRecord,
    *,
    command: str = "",
    timing: Detail = "short",
    device: torch.device = ALONE.device,
) -> Results:
    """Time teacher and student, and write ``results.json``, as a comparison of both.

    Args:
        plan: What was done.
        done: All runs of :func:`distil`.
        teacher: What :func:`teacher_record` has made.
        command: The command that repeats it.
        timing: What is timed, see :func:`~stateline.runs.speed.cells`.
        device: Where both are timed.
    """
    jobs = [plan.teacher_job(), done[-1].job]
    begun = outline(jobs, {plan.spec: plan.task}, command)
    runs = [teacher, replace(student_record(done), model=jobs[-1].label)]
    speed = time_jobs(jobs, plan.folder, device, timing)
    results = replace(begun, runs=runs, speed=speed, finished=True)
    write_results(plan.folder, results)
    return results
