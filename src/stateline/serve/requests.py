"""The requests that a server understands, and how they become rows."""

import re
import secrets
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.generate import Sampling
from stateline.serve.engine import Row

Count = Annotated[int, Meta(ge=1, lt=2**31)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
Share = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Zero = Annotated[float, Meta(ge=0, le=0)]
One = Annotated[int, Meta(ge=1, le=1)]
Word = Annotated[str, Meta(min_length=1, max_length=1000)]
Stop = Word | Annotated[list[Word], Meta(max_length=16)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Tokens = list[Token]

ID = "resp_"
_ID = re.compile(ID + "([0-9a-f]{64})_[0-9a-f]{16}")

RequestT = TypeVar("RequestT", bound="Request")


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream contains in addition to the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Request(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of requests; other fields of OpenAI may have values without effect.

    Attributes:
        model: The name of the model.
        temperature: See :class:`stateline.generate.Sampling`, also for the next four.
        top_p: See there.
        top_k: See there; 0 and -1 are all tokens.
        min_p: See there; 0 is all tokens.
        repetition_penalty: See there.
        stop: Strings before which the text ends.
        seed: Seed of the random choices; by default a random one.
        stream: Whether the text comes in pieces.
        cache_salt: Kept states are shared only with requests of the same salt.
    """

    model: Word
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: float | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    stream: bool | None = None
    cache_salt: Word | None = None
    user: str | None = None

    def row_of(self, text: str | Tokens, tokenizer: Tokenizer, *, begins: bool) -> Row:
        """The row that continues a text, from its beginning or not; each kind adds its fields."""
        encode = tokenizer.prompt if begins else tokenizer.encode
        temperature = 1.0 if self.temperature is None else self.temperature
        penalty = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        top_k = None if self.top_k in (0, -1) else self.top_k
        return Row(
            encode(text).tolist() if isinstance(text, str) else text,
            sampling=Sampling(temperature, top_k, self.top_p, penalty, self.min_p or None),
            seed=secrets.randbits(62) if self.seed is None else self.seed,
            stop=self.stop or (),
            salt=self.cache_salt or "",
        )


class CompletionRequest(Request, kw_only=True, forbid_unknown_fields=True):
    """A request to ``/v1/completions``: the text that follows a prompt, or a list of one prompt."""

    prompt: str | list[Token | str | Tokens]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream_options: StreamOptions | None = None
    n: One | None = None
    best_of: One | None = None
    echo: bool | None = None
    suffix: None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0)] | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None

    def row(self, tokenizer: Tokenizer) -> Row:
        """The row of a prompt."""
        if self.echo:
            raise InputError("echo is not offered: join the prompt and the answer yourself")
        row = self.row_of(_only(self.prompt), tokenizer, begins=True)
        row.new_tokens, row.log_probs = self.max_tokens or 16, self.logprobs
        return row


class ResponseRequest(Request, kw_only=True, forbid_unknown_fields=True):
    """A request to ``/v1/responses``: the next turn of a conversation whose state is kept.

    Attributes:
        input: Text or tokens; chats are not supported.
        previous_response_id: The response that this one continues.
        max_output_tokens: Largest number of new tokens.
        store: Whether the state after the response is kept, to be continued.
    """

    input: str | Tokens
    previous_response_id: Word | None = None
    max_output_tokens: Count | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    instructions: None = None
    tools: Annotated[list[None], Meta(max_length=0)] | None = None
    truncation: Literal["disabled"] | None = None

    def row(self, tokenizer: Tokenizer) -> Row:
        """The row of an input, which may continue a kept state."""
        row = self.row_of(self.input, tokenizer, begins=self.previous_response_id is None)
        row.new_tokens = self.max_output_tokens or 256
        row.store = self.store is not False
        if self.previous_response_id is not None:
            row.after = key_of(self.previous_response_id)
        return row


def _only(prompt: str | list[int | str | Tokens]) -> str | Tokens:
    """The prompt, which may be that of a list of one."""
    match prompt:
        case (str() as only) | [(str() | list()) as only]:
            return only
    tokens = [token for token in prompt if isinstance(token, int)]
    if len(tokens) < len(prompt):
        raise InputError(
            f"a request has one prompt, got a list of {len(prompt)}: send a request for each"
        )
    return tokens


def response_id(key: bytes) -> str:
    """A name for a response, from which the key of its kept state can be read."""
    return f"{ID}{key.hex()}_{secrets.token_hex(8)}"


def key_of(name: str) -> bytes:
    """The key under which the state after a response is kept."""
    found = _ID.fullmatch(name)
    if found is None:
        raise InputError(f"there is no response {name[:100]!r}: give the id of one")
    return bytes.fromhex(found[1])


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """Read a request."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(
            f"the request has a field or a value that this server does not take: {error}"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"the request cannot be read: {error}") from error
