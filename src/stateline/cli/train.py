"""Train one architecture on one task, and keep the model, the metrics and what was run."""

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.train.config import TrainConfig


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("pattern", type=str, help='layers, for example "attention h3*2"')
    parser.add_argument("--task", type=str, default="text", help='for example "text(path=books)"')
    parser.add_argument("--out", type=str, default="runs/train", help="folder for the run")
    parser.add_class_arguments(ModelConfig, "model", skip={"pattern", "vocab_size", "layers"})
    parser.add_class_arguments(TrainConfig, "train")


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Train, score, save."""
    task_name = parser.parse_args(arguments).task

    from pathlib import Path

    from stateline.cli.progress import print_metrics
    from stateline.compare import Job, run_job
    from stateline.models.size import count_parameters
    from stateline.tasks import make_task

    task = make_task(task_name)
    parser.set_defaults({f"train.{name}": value for name, value in task.training.items()})
    given = parser.parse_args(arguments)
    config = ModelConfig(given.pattern, task.vocab_size, **given.model.as_dict())
    training = TrainConfig(**given.train.as_dict())
    job = Job(task_name, count_parameters(config), config, training)
    with print_metrics(job) as show:
        result = run_job(job, Path(given.out), show)
    if result["stopped"] not in ("finished", "solved"):
        raise InputError(result["stopped"])
    print(f"{given.pattern}: {result['parameters']:,} parameters, {result['stopped']}")
    for length, scores in result["by_length"].items():
        shown = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
        print(f"  at length {length}: {shown}")
    print(f"the model is in {given.out}: stateline generate {given.out}")
    return 0
