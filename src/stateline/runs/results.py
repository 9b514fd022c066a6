"""The format of results: every field of ``results.json`` and ``result.json`` is defined here.

Results are validated when they are read: a value of the wrong type or a missing field is an error
that names its place in the file. Unknown fields are ignored, and fields added later have defaults,
so that older and newer files of the same format can be read.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from stateline.errors import InputError
from stateline.files import finite, integer_of_json
from stateline.runs.protocol_records import ProtocolRecord, TrialRecord
from stateline.runs.record import Bits, Length, Record, RecordT, Scores

FORMAT = "stateline-results-1"

TEACHER = "teacher"
"""Name of the teacher beside its student, and of the folder of its scores."""


class CurvePoint(Record, frozen=True, kw_only=True):
    """A point of a training curve.

    Attributes:
        step: Updates so far.
        loss: Mean training loss since the previous point, in nats per target.
        metric: The task's metric at the training length, where it was measured.
    """

    step: int
    loss: float | None
    metric: float | None


class CapacityRecord(Record, frozen=True, kw_only=True):
    """How the score depends on the precision of the state.

    Attributes:
        numbers: Numbers in the state of one sequence.
        needed: Fewest bits per number that keep the score; ``None`` if even the most do not.
        by_bits: Score by bits per number.
    """

    numbers: int
    needed: int | None
    by_bits: dict[Bits, float]


class TaskRecord(Record, frozen=True, kw_only=True):
    """A task, as the results describe it.

    Attributes:
        spec: The task with its keywords, as it was given: ``copying(max_len=15)``.
        name: Its name in the table of tasks.
        title: Its name for readers.
        about: What its score shows and does not show.
        metric: Name of the score.
        higher_is_better: True if a larger score is better.
        solved_at: Score at which the task counts as solved; ``None`` if it never does.
        train_length: Length of the training sequences.
        eval_lengths: Lengths at which models are scored; includes the training length.
        data: Description of the data, with its ``sha256``; empty for generated tasks.
        baselines: Scores of programs that need no training, such as gzip.
        problems: Number of answers behind each score, if the score is the share of right answers;
            0 for other scores, or if it is not recorded.
        chance: Share of right answers of a guess, see :meth:`stateline.tasks.Task.chance`;
            ``None`` for other scores, or if it is not recorded.
    """

    spec: str
    name: str
    title: str
    about: str
    metric: str
    higher_is_better: bool
    solved_at: float | None
    train_length: int
    eval_lengths: list[Length]
    data: dict[str, Any]
    baselines: dict[str, float]
    problems: int = 0
    chance: float | None = None

    def __post_init__(self) -> None:
        if self.train_length not in self.eval_lengths:
            raise ValueError(
                f"train_length {self.train_length} is not in eval_lengths {self.eval_lengths}"
            )


class RunRecord(Record, frozen=True, kw_only=True):
    """One model, trained on one task from one seed, and scored.

    Attributes:
        model: Name of the model: the one that it was given, or else its pattern or preset.
        task: Spec of the task.
        seed: Seed of the weights and of the data.
        d_model: Width.
        parameters: Number of parameters.
        parameters_wanted: Number of parameters that the width was chosen for.
        steps: Updates done.
        stopped: ``finished``, ``solved``, ``interrupted``, ``paused`` (a trial that stopped early),
            or why training diverged.
        seconds: Time spent in updates, without ``compile_seconds``.
        compile_seconds: Time spent in compiling or loading kernels: how much longer the first
            update took than the second one.
        tokens_per_second: Mean training speed.
        steps_to_solve: Updates before the task was first solved at the training length.
        curve: Loss and metric during training.
        by_length: Scores by length.
        by_position: The metric by position in a sequence of the longest length.
        capacity: Bits of the state that a solved task needs.
        sample: Text that the model wrote.
        training: The training configuration.
        environment: Versions, machine and device.
        imports: Files or modules with the user's own layers or tasks that were imported.
        family: Name of the architecture, of which this model is one size; empty if the comparison
            has a single size.
        size: The size that the width was chosen for, in the unit of the protocol's ``matched_by``;
            ``None`` if the model keeps its own width.
        own_size: The actual size of the model in the same unit: a model is matched if this is
            within the protocol's ``tolerance`` of ``size``.
        validation: The task's metric at the training length on data that the final scores do not
            use, after the last update; ``None`` if it was not measured.
    """

    model: str
    task: str
    seed: int
    d_model: int
    parameters: int
    parameters_wanted: int
    steps: int
    stopped: str
    seconds: float
    tokens_per_second: float
    steps_to_solve: int | None
    curve: list[CurvePoint]
    by_length: dict[Length, Scores]
    by_position: dict[Length, float | None] = field(default_factory=dict)
    capacity: CapacityRecord | None = None
    sample: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    family: str = ""
    size: int | None = None
    own_size: int | None = None
    validation: float | None = None
    compile_seconds: float = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """The inputs of the run, apart from its seed."""
        names = ("model", "task", "d_model", "parameters", "parameters_wanted")
        return {name: getattr(self, name) for name in names} | {
            "training": self.training | {"seed": 0}
        }


BUSY = 0.05
"""Share of processor time that other programs may use before timings are not to be trusted."""


class TimingRecord(Record, frozen=True, kw_only=True):
    """Speed of one model in one phase at one length and batch; or why it was not measured.

    Attributes:
        phase: ``train`` (a whole update), ``prefill`` (reading a prompt) or ``decode`` (one token
            after the other).
        length: Tokens of a row; for decoding, tokens already in the state.
        batch: Rows.
        tokens_per_second: Median of the rounds, over all rows; ``None`` if it was not measured.
        low: Lower end of the spread: the first quartile of the rounds, or the lower limit of the
            95 % interval of their median, or 2 % less than the median, whichever is least.
        high: Upper end of the spread, found in the same way.
        rounds: Number of rounds.
        peak_memory: Bytes that a call needs beyond the model and its inputs; ``None`` if unknown.
        skipped: Why it was not measured; empty if it was.
    """

    phase: Literal["train", "prefill", "decode"]
    length: Length
    batch: Annotated[int, Meta(ge=1)]
    tokens_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    peak_memory: int | None = None
    skipped: str = ""


class SpeedRecord(Record, frozen=True, kw_only=True):
    """Costs of one model, by length in tokens.

    Attributes:
        model: Name of the model.
        task: Spec of the task whose vocabulary the measured model has.
        d_model: Width.
        parameters: Number of parameters.
        train_tokens_per_second: Training speed by sequence length.
        decode_tokens_per_second: Decoding speed by tokens already in the state.
        state_bytes: Size of the state of one sequence by tokens already in it; empty if the model
            is not causal and has none.
        flops_per_token: Forward FLOPs per token by sequence length.
        longest_copy: Longest string whose copy the size of the state allows; ``None`` if there is
            no limit; unset if the model is not a language model.
        device: Where the speed was measured.
        precision: Precision of the training steps.
        timings: All timings with their spread, and which were skipped.
        threads: Threads of a CPU that were used.
        machine: Where the speed was measured, in words.
        busy: Share of the processor time that other programs used meanwhile; ``None`` if unknown.
    """

    model: str
    task: str
    d_model: int
    parameters: int
    train_tokens_per_second: dict[Length, int | float]
    decode_tokens_per_second: dict[Length, int | float]
    state_bytes: dict[Length, int | float]
    flops_per_token: dict[Length, int | float]
    longest_copy: int | UnsetType | None = UNSET
    device: str = "cpu"
    precision: str = "float32"
    timings: list[TimingRecord] = field(default_factory=list)
    threads: int = 1
    machine: str = ""
    busy: float | None = None

    @property
    def disturbed(self) -> bool:
        """True if other programs used so much of the machine that speeds are not to be trusted."""
        return self.busy is not None and self.busy > BUSY


class Source(Record, frozen=True, kw_only=True):
    """Where merged results come from.

    Attributes:
        folder: Folder of the results; empty for results that were not merged.
        command: How to produce them again.
        created: When they were begun.
        finished: True if all planned runs and measurements are there.
        environment: Versions, machine and device.
    """

    folder: str
    command: str
    created: str
    finished: bool
    environment: dict[str, Any]


class Results(Record, frozen=True, kw_only=True):
    """The content of ``results.json``: a comparison, a training run, or several of them merged.

    Attributes:
        format: :data:`FORMAT`.
        command: How to produce the results again.
        created: When they were begun, in ISO 8601.
        finished: True if all planned runs and measurements are there.
        environment: Versions, machine and device.
        models: Names of the models, in the order in which they were given.
        tasks: The tasks.
        runs: The runs that have finished so far.
        speed: Costs of the models.
        sources: Where merged results come from; empty for other results.
        protocol: How the settings of the runs were chosen; ``None`` if that is not recorded.
        trials: Settings that were tried, the chosen ones among them.
    """

    format: str
    command: str
    created: str
    finished: bool
    environment: dict[str, Any]
    models: list[str]
    tasks: list[TaskRecord]
    runs: list[RunRecord]
    speed: list[SpeedRecord]
    sources: list[Source] = field(default_factory=list)
    protocol: ProtocolRecord | None = None
    trials: list[TrialRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.models or not self.tasks:
            raise ValueError("there must be at least one model and one task")
        tasks = {task.spec: task for task in self.tasks}
        for model in (*(run.model for run in self.runs), *(entry.model for entry in self.speed)):
            if model not in self.models:
                raise ValueError(f"model {model!r} of a record is not listed in models")
        for run in self.runs:
            _check_scores(run, tasks.get(run.task))

    def origins(self) -> list[Source]:
        """The sources; results that were not merged are their own source."""
        own = Source(
            folder="",
            command=self.command,
            created=self.created,
            finished=self.finished,
            environment=self.environment,
        )
        return self.sources or [own]


def _check_scores(run: RunRecord, task: TaskRecord | None) -> None:
    """Raise ValueError unless a run has the task's metric at each of its lengths."""
    if task is None:
        raise ValueError(f"task {run.task!r} of a run is not listed in tasks")
    for length in task.eval_lengths:
        if task.metric not in run.by_length.get(length, {}):
            raise ValueError(f"a run of {run.task!r} lacks {task.metric!r} at length {length}")


def to_json(record: Record, indent: int | None = None) -> str:
    """A record as JSON text; numbers that are not finite become ``null``."""
    return json.dumps(finite(msgspec.to_builtins(record, enc_hook=_text)), indent=indent) + "\n"


def from_json(text: str | bytes, kind: type[RecordT]) -> RecordT:
    """Read a record.

    Raises:
        ValueError: If the text is not JSON, or a field is missing or has the wrong type; the
            message names its place.
    """
    try:
        values = json.loads(text, parse_int=integer_of_json)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return convert(values, kind)


def convert(values: Any, kind: type[RecordT]) -> RecordT:
    """A record from plain data, validated as in :func:`from_json`."""
    if kind is Results and isinstance(values, Mapping):
        found = values.get("format", FORMAT)
        if found != FORMAT:
            raise InputError(
                f"the format must be {FORMAT!r}, got {found!r:.60}: use the version of stateline "
                "that wrote the results"
            )
    return msgspec.convert(values, kind, str_keys=True)


def _text(value: object) -> str:
    """Convert an instance of a subclass of ``str``, such as PyTorch's version, to a string."""
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"results cannot hold a value of type {type(value).__name__}")
