"""Train one architecture on one task, and keep the model, the metrics and what was run.

RECIPE is a YAML file with the options below, a pattern, or the name of a published model, such as
h3-125m. Options given override it. Under ``torchrun``, the processes share the rows of each batch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, SIGTERM, signal
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser, Namespace

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.presets import find_preset
from stateline.train.config import TrainConfig

if TYPE_CHECKING:
    from stateline.compare import Job, Results

NOT_OF_THE_RECIPE = ("recipe", "resume", "dry_run", "print_config", "device")
CONFIG = "config.yaml"
OF_OTHERS = ("results.json", "config.json", "index.json")
"""In a folder without that file: of a comparison, of a model, of a corpus."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "recipe", type=str, help='a YAML file, or layers, for example "attention h3*2", or a preset'
    )
    parser.add_argument("--pattern", type=str | None, default=None, help="layers, in a recipe")
    parser.add_argument("--task", type=str, default="text", help='for example "text(path=books)"')
    parser.add_argument("--out", type=str, default="runs/train", help="folder for the run")
    parser.add_class_arguments(ModelConfig, "model", skip={"pattern", "vocab_size"})
    parser.add_argument(
        "--model.pooling",
        type=Literal["mean", "last"] | None,
        default=None,
        help="what a classifier answers from; by default the mean of all positions",
    )
    parser.add_class_arguments(TrainConfig, "train")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in the folder"
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="show size, operations and memory; train nothing"
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print the whole recipe; train nothing"
    )
    parser.add_argument(
        "--device", type=Literal["auto", "cpu", "cuda"], default="auto", help="where it computes"
    )


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Train, score, save."""
    given = read_recipe(arguments, parser)

    from stateline.cli.progress import print_metrics
    from stateline.compare import Job, check_job, record_run, run_job
    from stateline.models.size import count_parameters
    from stateline.tasks import make_task
    from stateline.train.processes import join_processes

    task = make_task(given.task)
    parser.set_defaults({f"train.{name}": value for name, value in task.training.items()})
    given = read_recipe(arguments, parser)
    resolved = given.clone()
    for name in NOT_OF_THE_RECIPE:
        resolved.pop(name)
    recipe = parser.dump(resolved, skip_validation=True)
    if given.print_config:
        print(recipe, end="")
        return 0
    config = task.model_config(given.pattern, given.model.as_dict())
    training = TrainConfig(**given.train.as_dict())
    data = str(task.describe().get("sha256", ""))
    job = Job(given.task, count_parameters(config), config, training, data)
    check_job(job, task)
    if given.dry_run:
        _print_costs(job)
        return 0
    folder = Path(given.out)
    with join_processes(given.device) as processes, _signals() as caught:
        here = processes.environment()
        processes.on_main(lambda: _enter(folder, recipe, given.resume, here))
        with print_metrics(job, folder, quiet=not processes.main) as show:
            result = run_job(
                job, folder, show, processes=processes, interrupted=lambda: bool(caught)
            )
        interrupted = result["stopped"] == "interrupted"
        if processes.main and result["stopped"] in ("finished", "solved"):
            record_run(job, result, folder, command=_command(arguments))
        if processes.main:
            _print_result(job, result, folder)
    return 128 + (caught or [SIGTERM])[0] if interrupted else 0


def read_recipe(arguments: Sequence[str], parser: ArgumentParser) -> Any:
    """What was given: the recipe's settings, under those of the command line."""
    given = parser.parse_args(arguments)
    if not given.recipe.endswith((".yaml", ".yml")):
        if given.pattern is not None:
            raise InputError("give one pattern: --pattern changes that of a recipe")
        preset = find_preset(given.recipe)
        if preset is not None:
            settings = dataclasses.asdict(preset)
            del settings["pattern"], settings["vocab_size"]  # which is the task's
            parser.set_defaults({f"model.{name}": value for name, value in settings.items()})
            given = parser.parse_args(arguments)
        given.pattern = given.recipe if preset is None else preset.pattern
        return given
    if not Path(given.recipe).is_file():
        raise InputError(f"no such recipe: {given.recipe}")
    parser.default_config_files = [given.recipe]
    try:
        given = parser.parse_args(arguments)
    except (ValueError, RecursionError) as error:  # also what is no text, or nested without end
        raise InputError(f"the recipe {given.recipe}: {error}") from error
    for section in ("model", "train"):
        if not isinstance(given[section], Namespace):
            raise InputError(
                f"the recipe {given.recipe} must have settings in {section}, got {given[section]!r}"
            )
    if given.pattern is None:
        raise InputError(f"the recipe {given.recipe} names no pattern: add a line such as h3*2")
    return given


def _enter(folder: Path, recipe: str, resume: bool, here: Mapping[str, str | int]) -> None:
    """Begin a run's folder, or see that one may go on there."""
    from stateline.files import write_text
    from stateline.train import checkpoint

    kept = checkpoint.found(folder)
    begun = kept or any((folder / name).exists() for name in OF_OTHERS)
    if begun and not (folder / CONFIG).exists():
        raise InputError(f"{folder} holds something else than a run: choose another with --out")
    if begun and not resume:
        raise InputError(
            f"{folder} holds a run: add --resume to go on with it, or choose another with --out"
        )
    if not kept:
        write_text(folder / CONFIG, recipe)
        if resume:
            print(f"nothing to go on from in {folder}: from the beginning")
        return
    print(f"going on from {kept[-1]}")
    if changes := checkpoint.other_environment(kept[-1], here):
        print(f"not to the bit as without a stop: {changes}")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that the run can save and leave; a second SIGINT ends it."""
    caught: list[int] = []

    def note(number: int, _: object) -> None:
        if caught and number == SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal(number, note) for number in (SIGINT, SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal(number, handler)


def _print_costs(job: "Job") -> None:
    from stateline.models.size import meta_model, training_bytes
    from stateline.reports.format import short_bytes, short_number
    from stateline.tasks import make_task

    task, training = make_task(job.task), job.training
    tokens = task.train_batch(0).tokens
    rows, length = tokens.shape[:2]
    model = meta_model(job.model)
    passes = 4 if training.checkpoint_activations else 3  # forward, twice as much backward
    per_update = passes * model.flops_per_token(length) * rows * length * training.accumulate
    segment = min(length, training.segment_len or length)
    memory = training_bytes(model, rows, segment, recompute=training.checkpoint_activations)
    print(f"{job.model.pattern} on {job.task}: d_model {job.model.d_model}")
    print(f"  parameters      {sum(p.numel() for p in model.parameters()):,}")
    print(f"  an update       {training.accumulate * rows} x {length} tokens")
    print(
        f"  operations      {short_number(per_update)} an update, "
        f"{short_number(per_update * training.steps)} in {training.steps:,} updates"
    )
    total = short_bytes(sum(memory.values()))
    print(f"  memory          {total}, estimated in float32 for one process")
    for name, size in memory.items():
        print(f"    {name:<13} {short_bytes(size)}")
    print(f"  state of a row  {short_bytes(model.state_bytes(length))} after {length} tokens")


def _print_result(job: "Job", result: "Results", folder: Path) -> None:
    pattern, steps = job.model.pattern, result["steps"]
    if result["stopped"] == "interrupted":
        print(f"{pattern}: stopped and saved after {steps} steps; go on with --resume")
        return
    if result["stopped"] not in ("finished", "solved"):
        raise InputError(result["stopped"])
    print(f"{pattern}: {result['parameters']:,} parameters, {result['stopped']}")
    for length, scores in result["by_length"].items():
        shown = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
        print(f"  at length {length}: {shown}")
    writes = type(job.model) is ModelConfig  # and does not classify
    print(f"the model is in {folder}" + (f": stateline generate {folder}" if writes else ""))


def _command(arguments: Sequence[str]) -> str:
    import shlex

    return shlex.join(["stateline", "train", *(a for a in arguments if a != "--resume")])
