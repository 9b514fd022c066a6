"""What a server counts, in the format of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """Counters of one server; they begin with zero in every process."""

    def __init__(self) -> None:
        self._registry = to = CollectorRegistry()
        labels = ["path", "status"]
        self._requests = Counter("stateline_requests", "Answers", labels, registry=to)
        self._prompt = Counter("stateline_prompt_tokens", "Tokens of prompts", registry=to)
        self._reused = Counter("stateline_reused_tokens", "Prompt tokens not reread", registry=to)
        self._new = Counter("stateline_new_tokens", "Tokens that were decoded", registry=to)
        self._steps = Histogram("stateline_step_seconds", "Time of a step of all rows", registry=to)
        self._rows = Gauge("stateline_rows", "Texts that are decoded now", registry=to)
        self._waiting = Gauge("stateline_waiting", "Texts that wait for a row", registry=to)
        self._bytes = Gauge("stateline_state_bytes", "Kept states", ["where"], registry=to)

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(path, status).inc()

    def read(self, tokens: int, reused: int) -> None:
        """Count the tokens of a prompt."""
        self._prompt.inc(tokens)
        self._reused.inc(reused)

    def step(self, rows: int, seconds: float) -> None:
        """Count a step."""
        self._new.inc(rows)
        self._steps.observe(seconds)

    def now(self, rows: int, waiting: int, in_memory: int, on_disk: int) -> None:
        """Set the gauges."""
        self._rows.set(rows)
        self._waiting.set(waiting)
        self._bytes.labels("memory").set(in_memory)
        self._bytes.labels("disk").set(on_disk)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)
