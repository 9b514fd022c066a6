"""How the settings of a comparison's runs were chosen, as results record it."""

from typing import Literal

from msgspec import field

from stateline.runs.record import Record

MatchedBy = Literal["parameters", "flops", "state", "none"]
"""The size that all models of a comparison share: parameters, FLOPs per token or state bytes at one
length, or nothing."""

TOLERANCE = 0.05
"""Relative distance from the wanted size up to which a model is called matched."""


def matched_in(by: MatchedBy, length: int | None) -> str:
    """The quantity in which models are matched, in words; empty for none.

    Example:
        >>> matched_in("state", 2000), matched_in("flops", None)
        ('state bytes at 2,000 tokens', 'FLOPs per token at the training length')
    """
    at = "at the training length" if length is None else f"at {length:,} tokens"
    return {
        "parameters": "parameters",
        "flops": f"FLOPs per token {at}",
        "state": f"state bytes {at}",
        "none": "",
    }[by]


class ProtocolRecord(Record, frozen=True, kw_only=True):
    """How the settings of a comparison's runs were chosen.

    Tasks are named by their spec.

    Attributes:
        name: ``sweep`` (settings chosen by validation, several seeds) or ``quick`` (one setting,
            not chosen).
        learning_rates: Learning rates that were tried, by task.
        muon_rates: Learning rates of Muon's matrices that were tried, by task; empty without Muon.
        weight_decays: Weight decays that were tried, by task.
        seeds: Seeds of the scored runs, by task.
        trial_seed: Seed of all trials; no scored run has it. ``None`` without trials.
        rungs: Shares of the steps after which only the best trials continue.
        kept: Share of the trials that continues, rounded up.
        validation: What trials were scored on, in words, by task; empty without trials.
        matched_by: What the models of one size have in common.
        match_length: Tokens at which they have it in common; ``None`` for the training length.
        sizes: The sizes that were asked for, as numbers of parameters; empty if the first model
            sets the size.
        looks: Number of looks at the scores while seeds were added; 1 for a fixed number of seeds.
        tolerance: Relative distance from the wanted size up to which a model counts as matched.
    """

    name: Literal["sweep", "quick"]
    learning_rates: dict[str, list[float]] = field(default_factory=dict)
    muon_rates: dict[str, list[float]] = field(default_factory=dict)
    weight_decays: dict[str, list[float]] = field(default_factory=dict)
    seeds: dict[str, list[int]] = field(default_factory=dict)
    trial_seed: int | None = None
    rungs: list[float] = field(default_factory=list)
    kept: float = 1.0
    validation: dict[str, str] = field(default_factory=dict)
    matched_by: MatchedBy = "parameters"
    match_length: int | None = None
    sizes: list[int] = field(default_factory=list)
    looks: int = 1
    tolerance: float = TOLERANCE


class TrialRecord(Record, frozen=True, kw_only=True):
    """One setting of one model that was tried.

    Attributes:
        model: Name of the model in the results.
        task: Spec of the task.
        size: The size that the width was chosen for, as in the model's runs.
        lr: Learning rate.
        muon_lr: Learning rate of the matrices that Muon updates; ``None`` if it is ``lr``, or
            without Muon.
        weight_decay: Weight decay.
        seed: Seed of the weights and of the data.
        steps: Updates done.
        steps_planned: Updates of a run that is not stopped early.
        validation: The task's metric at the training length on validation data after the last
            update; ``None`` if training diverged.
        stopped: ``finished``, ``solved``, ``paused`` (stopped early) or why training diverged.
        chosen: True for the setting of the scored runs.
        seconds: Time spent in updates, without ``compile_seconds``.
        compile_seconds: Time spent in compiling or loading kernels.
    """

    model: str
    task: str
    size: int | None = None
    lr: float
    muon_lr: float | None = None
    weight_decay: float
    seed: int
    steps: int
    steps_planned: int
    validation: float | None
    stopped: str
    chosen: bool
    seconds: float
    compile_seconds: float = 0.0
