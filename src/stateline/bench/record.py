"""The record of a benchmark: figures, the machine, and whether the figures can be trusted."""

import msgspec

FORMAT = "stateline-bench-1"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured candidate of one case.

    Attributes:
        case: What is computed, for example ``diagonal_ssm``; candidates of a case are compared.
        candidate: Who computes it: a backend, a model, or a peer.
        work: What is timed: ``forward``, ``forward+backward``, ``update``, ``prefill``, ``decode``.
        batch: Rows.
        length: Positions of a row; for decoding, tokens of the prompt.
        positions: Divisor of the time: the positions (times channels, for ops and layers)
            of one call.
        seconds: Median of a call.
        low: First quartile.
        high: Third quartile.
        first: The first call, with compilation.
        n_bytes: Peak memory beyond the inputs, where it was measured; for decoding, the state.
        floor_share: Least time that the machine's own peaks allow, over the median: 1 is perfect.
        error: Largest difference to float64 over the largest entry, where it was measured.
    """

    case: str
    candidate: str
    work: str
    batch: int
    length: int
    positions: int
    seconds: float
    low: float
    high: float
    first: float
    n_bytes: int | None = None
    floor_share: float | None = None
    error: float | None = None

    @property
    def nanoseconds(self) -> float:
        """Nanoseconds per position; for ops and layers, per position and channel."""
        return 1e9 * self.seconds / self.positions


class Skipped(msgspec.Struct, frozen=True):
    """A candidate that could not run, or would have taken too long."""

    case: str
    candidate: str
    work: str
    length: int
    reason: str


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run of ``stateline bench``.

    Attributes:
        format: Of the file.
        suite: ``ops``, ``layers``, ``train`` or ``decode``.
        command: How to measure again.
        created: Date and time, UTC.
        environment: Versions and machine.
        device: Where it ran, in words.
        dtype: Of inputs and weights.
        threads: Threads of a CPU.
        bytes_per_second: Measured bandwidth of a copy.
        flops_per_second: Measured rate of a matrix product.
        foreign_cores: Cores that other programs used meanwhile, on average.
        busy: True if that was too much: the figures are then not to be trusted.
        figures: What was measured.
        skipped: What was not, and why.
    """

    suite: str
    command: str
    created: str
    environment: dict[str, str | int]
    device: str
    dtype: str
    threads: int
    bytes_per_second: float
    flops_per_second: float
    foreign_cores: float | None
    busy: bool
    figures: tuple[Figure, ...]
    skipped: tuple[Skipped, ...] = ()
    format: str = FORMAT
