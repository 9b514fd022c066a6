"""What clients ask for, what they get, and the limits of both."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from stateline.errors import InputError
from stateline.generate import Penalties, Sampling


class BusyError(InputError):
    """There are too many requests."""

    status = 429


class StoppedError(InputError):
    """The server is ending."""

    status = 503


class LateError(InputError):
    """The time of a text has ended before it was read."""

    status = 503


@dataclass(frozen=True)
class Limits:
    """Limits of a server: for all clients together, and for one text or request.

    Attributes:
        rows: Texts that are decoded together.
        waiting: Texts that wait for a row.
        new_tokens: New tokens of one text.
        length: Tokens of one text, new ones included.
        seconds: Time of one text from its arrival; after that time the text ends.
        memory: Bytes of the states of all rows.
        body: Bytes of one request.
        bodies: Bytes of all requests without an answer.
    """

    rows: int = 64
    waiting: int = 1024
    new_tokens: int = 4096
    length: int = 1 << 20
    seconds: float = 600.0
    memory: int = 1 << 31
    body: int = 1 << 23
    bodies: int = 1 << 26

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"the limit {name} must be positive, got {value}")


@dataclass(frozen=True)
class LogProbs:
    """A token and its log-probability in nats, and the same for the likeliest tokens.

    The first token of a text has none.
    """

    token: int
    log_prob: float | None
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """What one step adds to a text.

    Attributes:
        text: Text that is certain now.
        tokens: Number of new tokens.
        log_probs: Log-probabilities of these tokens, if they were asked for.
        prompt: The same for the tokens of the prompt, in the first piece.
        reused: Tokens before the answer, earlier turns included, that a kept state covers.
        length: Tokens of the text so far, with the prompt.
        finish: ``stop``, ``length`` or ``time`` if this is the last piece.
        key: Key of the state so far; in the last piece, the key under which it is kept.
        error: Why the text ended, if it was not finished.
    """

    text: str = ""
    tokens: int = 0
    log_probs: tuple[LogProbs, ...] = ()
    prompt: tuple[LogProbs, ...] = ()
    reused: int = 0
    length: int = 0
    finish: str = ""
    key: bytes = b""
    error: Exception | None = None


@dataclass(eq=False)
class Row:
    """A text that a client has asked for.

    Attributes:
        tokens: The prompt, or its continuation.
        after: Key of the kept state that it continues.
        turn_end: Token that is left out at the beginning of a continuation, if the text before
            ends with it.
        sampling: How tokens are chosen.
        penalties: What is added to the logits before.
        seed: Seed of the random choices.
        new_tokens: Largest number of new tokens; ``None`` for as many as the limits allow.
        stop: Strings before which the text ends.
        ends: Tokens before which it ends; by default the tokenizer's.
        least: Number of tokens before which nothing ends it.
        special: Whether special tokens have a text.
        log_probs: Number of likeliest tokens to return with each token; ``None`` for no
            log-probabilities.
        scored: Whether log-probabilities of the prompt are returned, too.
        salt: Kept states are shared only with texts of the same salt.
        store: Whether the state at the end must outlive the process.
        name: Key under which the state at the end is kept; by default the hash of the whole text.
        put: Called by the engine's ``deliver`` with every piece.
        left: Set when the client has left; the row then leaves before the next step.
    """

    tokens: Sequence[int]
    after: bytes | None = None
    turn_end: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    penalties: Penalties = field(default_factory=Penalties)
    seed: int = 0
    new_tokens: int | None = 16
    stop: Sequence[str] = ()
    ends: Collection[int] | None = None
    least: int = 0
    special: bool = False
    log_probs: int | None = None
    scored: bool = False
    salt: str = ""
    store: bool = False
    name: bytes = b""
    left: bool = False
    put: Callable[[Piece], None] = lambda piece: None  # noqa: ARG005
