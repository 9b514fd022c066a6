"""The format of ``probes.json``."""

from typing import Literal

from stateline.runs.record import Record
from stateline.runs.verdict import wilson

Format = Literal["stateline-probes-1"]
FORMAT: Format = "stateline-probes-1"


class Sample(Record, frozen=True, kw_only=True):
    """The first example of a point, for readers.

    Attributes:
        prompt: The end of the prompt.
        accepted: The accepted answers.
        text: What the model wrote.
    """

    prompt: str
    accepted: list[str]
    text: str


class Point(Record, frozen=True, kw_only=True):
    """The score of a model on a probe at one length.

    Attributes:
        model: Name of the model.
        task: Name of the probe.
        length: Length, in the unit of the probe.
        key: Hash of all that the score depends on; a point with another key is measured again.
        examples: Number of examples; 0 if it was skipped.
        exact_match: Share of exact answers.
        f1: Mean F1.
        prompt_tokens: Tokens of the longest prompt.
        seconds: Time spent.
        skipped: Why nothing was measured; empty if something was.
        sample: The first example.
    """

    model: str
    task: str
    length: int
    key: str
    examples: int
    exact_match: float
    f1: float
    prompt_tokens: int
    seconds: float
    skipped: str = ""
    sample: Sample | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the share of exact answers."""
        return wilson(self.exact_match, self.examples)


class ProbeResults(Record, frozen=True, kw_only=True):
    """The content of ``probes.json``.

    Attributes:
        format: :data:`FORMAT`.
        command: How to produce the results again.
        created: When they were begun, in ISO 8601.
        environment: Versions and machine.
        points: The scores so far.
    """

    format: Format
    command: str
    created: str
    environment: dict[str, str | int]
    points: list[Point]

    def models(self, task: str = "") -> list[str]:
        """Models in order of their first point; with ``task``, only models scored on that probe."""
        chosen = (p for p in self.points if not task or (p.task == task and not p.skipped))
        return list(dict.fromkeys(point.model for point in chosen))

    def lengths(self, task: str) -> list[int]:
        """The lengths of a probe, in order."""
        return sorted({point.length for point in self.points if point.task == task})

    def find(self, model: str, task: str, length: int) -> Point | None:
        """The point of a model on a probe at a length."""
        wanted = (model, task, length)
        return next((p for p in self.points if (p.model, p.task, p.length) == wanted), None)

    def known(self, model: str, task: str, length: int, key: str) -> Point | None:
        """The point of a model on a probe at a length, if it has this key."""
        point = self.find(model, task, length)
        return point if point is not None and point.key == key else None
