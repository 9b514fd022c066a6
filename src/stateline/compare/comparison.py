"""What a comparison consists of: every model, at every size, on every task, from every seed."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from stateline.compare.recipe import Recipe, read_models
from stateline.compare.seeds import Wanted
from stateline.compare.sizes import Size, Sized, choose_widths
from stateline.errors import InputError, check_choice
from stateline.generate.runs import weights_hash
from stateline.pattern import MAX_REPEAT, format_pattern, parse_pattern
from stateline.runs.job import Job
from stateline.runs.protocol_records import MatchedBy
from stateline.runs.verdict import FIRST_LOOK
from stateline.settings import at_least
from stateline.tasks import TASKS, Task, make_task
from stateline.train.config import TrainConfig
from stateline.train.teacher import teacher_hash

SEEDS = {"sweep": 3, "quick": 1}
"""Number of seeds of the scored runs by protocol, if nothing else sets it."""

SEEDS_TO_DECIDE = 6
"""Largest number of seeds of a model with ``decide``, if nothing else sets it."""

_MOST_PARAMETERS = 10**11

_TRAINING = [setting.name for setting in fields(TrainConfig)]

_FOR_ALL_RUNS = ("steps", "lr", "precision")
"""Settings of training that a comparison also has under its own name."""


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    The first model sets the size on each task: by ``d_model`` or ``parameters`` if one is given, by
    its own width if it has one, and by a width of 64 otherwise. All other patterns get the width at
    which they match it best. Presets and recipes with a width keep it, unless ``d_model`` or
    ``parameters`` is given. Models with given weights keep their width and refuse both settings.

    Attributes:
        patterns: Architectures: patterns, names of presets such as ``mamba-130m``, folders of
            models to start from, or recipes. ``name=pattern`` gives a name for the results. The
            task's vocabulary replaces that of a preset.
        tasks: Tasks, in the grammar of patterns: ``copying(max_len=15)``. A repeat count is a
            number of seeds: ``associative_recall*3``. Settings of training may stand among the
            task's keywords and hold for this task only: ``text(length=128, steps=250)``.
        d_model: Width of the first model.
        parameters: Number of parameters of the first model; with ``match=parameters``, of all.
            Several numbers compare the models at each of these sizes.
        steps: Training steps; by default the task's own.
        lr: Learning rate of all runs; by default the protocol chooses it.
        precision: Precision of training; by default the task's own, which is mostly float32.
        protocol: ``sweep`` tries several settings of each model, stops the worse ones early,
            chooses by validation, and trains the chosen one from several seeds. ``quick`` trains
            once, at the task's own settings.
        lrs: Learning rates to try; by default the model's own, a third of it and three times it.
        muon_lrs: Learning rates to try for the matrices that Muon updates, combined with all
            others; by default rates around ``lr``. For ``optimizer=muon`` alone.
        weight_decays: Weight decays to try; by default the model's own.
        seeds: Seeds of the scored runs, where the task has no repeat count; by default 3, and 1
            for ``quick``. With ``decide``, the most seeds of a model, by default 6.
        decide: When to stop adding seeds to the first 3: when the ``best`` model of each task
            differs significantly from the others, or when all models do (``order``). ``no`` runs a
            fixed number of seeds. The default of ``stateline compare`` is ``best``.
        budget_minutes: Time after which no seeds are added.
        minutes: Time after which training stops, with what is done; the same comparison, started
            again, goes on.
        match: What the models have in common: ``parameters``, ``flops`` (per token), ``state``
            (its bytes) or ``none``.
        match_length: Tokens at which they have FLOPs or state bytes in common; by default the
            training length.
        model: Settings of all model configurations; they override presets and recipes.
        train: Settings of all training runs; they override tasks and recipes.
    """

    patterns: Sequence[str | Recipe]
    tasks: Sequence[str]
    d_model: int | None = None
    parameters: int | Sequence[int] | None = None
    steps: int | None = None
    lr: float | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    protocol: Literal["sweep", "quick"] = "sweep"
    lrs: Sequence[float] = ()
    muon_lrs: Sequence[float] = ()
    weight_decays: Sequence[float] = ()
    seeds: int | None = None
    decide: Wanted = "no"
    budget_minutes: float | None = None
    minutes: float | None = None
    match: MatchedBy = "parameters"
    match_length: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict, hash=False)
    train: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of parameters that were asked for; empty if the first model sets the size."""
        given = [self.parameters] if isinstance(self.parameters, int) else self.parameters or ()
        return tuple(dict.fromkeys(given))


class _TaskPlan(NamedTuple):
    """A task, the number of seeds, and the training settings for it alone."""

    task: str
    seeds: int
    train: dict[str, Any]


def make_tasks(comparison: Comparison) -> dict[str, Task]:
    """The tasks of a comparison by spec, each constructed once.

    Raises:
        InputError: If a task or one of its keywords cannot be used.
    """
    return {one.task: make_task(one.task) for one in _task_plans(comparison)}


def plan(comparison: Comparison, tasks: Mapping[str, Task] | None = None) -> list[Job]:
    """All scored runs, each at its width, with its settings before trials choose any.

    Args:
        comparison: What to compare.
        tasks: The tasks of :func:`make_tasks`; by default they are constructed here.

    Raises:
        InputError: If a pattern, task or setting cannot be used.
    """
    _check(comparison)
    models = read_models(comparison.patterns)
    tasks = make_tasks(comparison) if tasks is None else tasks
    hashes = {model.init: weights_hash(model.init) for model in models if model.init}
    jobs = []
    for spec, seeds, train in _task_plans(comparison):
        task, data = tasks[spec], str(tasks[spec].describe().get("sha256", ""))
        for model, label, sized in _sized(comparison, models, task):
            trainings = [
                _training(comparison, model, task, {**train, "seed": seed}) for seed in range(seeds)
            ]
            teacher = teacher_hash(trainings[0].teacher)
            jobs += [
                Job(
                    spec,
                    sized.parameters,
                    sized.config,
                    training,
                    data,
                    hashes.get(model.init, ""),
                    teacher,
                    alias=label,
                    family=model.name if label != model.name else "",
                    size=sized.size,
                    own_size=sized.own_size,
                    init=model.init,
                    metric=task.metric,
                )
                for training in trainings
            ]
    return jobs


def _sized(
    comparison: Comparison, models: Sequence[Recipe], task: Task
) -> Iterator[tuple[Recipe, str, Sized]]:
    """Every model on a task at every size, with its name."""
    sizes = comparison.sizes or (None,)
    match, width, length = comparison.match, comparison.d_model, comparison.match_length
    by_size = [
        choose_widths(models, task, Size(match, width, n, length), comparison.model) for n in sizes
    ]
    for place, model in enumerate(models):
        for wanted, sized in zip(sizes, by_size, strict=True):
            name = f"{model.name} · {short_size(wanted or 0)}" if len(sizes) > 1 else model.name
            yield model, name, sized[place]


def short_size(number: int) -> str:
    """A number of parameters with a suffix where that is exact.

    Example:
        >>> short_size(300_000), short_size(1_500_000), short_size(1234)
        ('300k', '1.5m', '1234')
    """
    for unit, suffix in ((10**6, "m"), (10**3, "k")):
        if number >= unit and number * 10 % unit == 0:
            return f"{number / unit:g}{suffix}"
    return str(number)


def _check(comparison: Comparison) -> None:
    if not comparison.patterns or not comparison.tasks:
        raise InputError("a comparison needs at least one pattern and one task")
    for wanted in comparison.sizes:
        if not 1 <= wanted <= _MOST_PARAMETERS:
            bound = "at least 1" if wanted < 1 else f"at most {_MOST_PARAMETERS:,}"
            raise InputError(f"parameters must be {bound}, got {wanted}")
    if comparison.match_length is not None:
        at_least(1, match_length=comparison.match_length)
        if comparison.match not in ("flops", "state"):
            raise InputError(
                "match_length goes with match=flops or match=state, got "
                f"match={comparison.match}: leave it out, or choose one of them"
            )
    _check_protocol(comparison)
    if "seed" in comparison.train:
        raise InputError("seed is set by the protocol: give the number of seeds instead")
    if "d_model" in comparison.model:
        raise InputError(
            "model.d_model would set the width of all models: give d_model, that of the first model"
        )
    for name in _FOR_ALL_RUNS:
        if name in comparison.train and getattr(comparison, name) is not None:
            raise InputError(f"{name} and train.{name} were both given: give one of the two")


def _check_protocol(comparison: Comparison) -> None:
    if comparison.seeds is not None and not 1 <= comparison.seeds <= MAX_REPEAT:
        raise InputError(f"seeds must be from 1 to {MAX_REPEAT}, got {comparison.seeds}")
    if comparison.decide != "no" and (comparison.seeds or FIRST_LOOK) < FIRST_LOOK:
        raise InputError(
            f"decide begins with {FIRST_LOOK} seeds and adds more, got seeds={comparison.seeds}: "
            "give more, or leave out decide"
        )
    for name in ("budget_minutes", "minutes"):
        limit = getattr(comparison, name)
        if limit is not None and not limit >= 0:
            raise InputError(f"{name} must be at least 0, got {limit:g}")
    if comparison.budget_minutes is not None and comparison.decide == "no":
        raise InputError(
            "budget_minutes limits the seeds that are added: give decide (--decide), or limit all "
            "runs by minutes"
        )
    tried = max(map(len, (comparison.lrs, comparison.muon_lrs, comparison.weight_decays))) > 1
    if comparison.protocol == "quick" and tried:
        raise InputError("the protocol quick tries nothing: give one rate, or use sweep")
    if comparison.lr is not None and comparison.lrs:
        raise InputError("lr sets the learning rate and lrs those to try: give one of the two")


def _task_plans(comparison: Comparison) -> list[_TaskPlan]:
    """The tasks, without their repeat counts and the training settings among their keywords."""
    plans: dict[str, _TaskPlan] = {}
    for text in comparison.tasks:
        item, *others = parse_pattern(text)
        own = inspect.signature(TASKS[item.name]).parameters if item.name in TASKS else ()
        of_training = set(_TRAINING).difference(own, ["seed"])
        train = {key: value for key, value in item.keywords.items() if key in of_training}
        keywords = {key: value for key, value in item.keywords.items() if key not in train}
        spec = format_pattern((item._replace(repeat=1, keywords=keywords), *others))
        usual = SEEDS[comparison.protocol] if comparison.decide == "no" else SEEDS_TO_DECIDE
        seeds = item.repeat if item.repeat > 1 else comparison.seeds or usual
        before = plans.get(spec, _TaskPlan(spec, 0, train))
        if before.train != train:
            raise InputError(
                f"{spec} is listed twice with different training settings: run two comparisons"
            )
        plans[spec] = before._replace(seeds=max(before.seeds, seeds))
    return list(plans.values())


def _training(
    comparison: Comparison, model: Recipe, task: Task, given: Mapping[str, Any]
) -> TrainConfig:
    chosen = {name: getattr(comparison, name) for name in _FOR_ALL_RUNS}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    settings = {**task.training, **model.train, **comparison.train, **chosen, **given}
    for name in settings:
        check_choice("training setting", name, _TRAINING)
    return TrainConfig(**settings)
