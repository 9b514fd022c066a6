"""The requests that a server understands, and how they become rows."""

import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from stateline.data import Tokenizer
from stateline.data.chat import chat_text, next_turn, turn_end
from stateline.errors import InputError
from stateline.generate import Penalties, Sampling
from stateline.serve.rows import Row

AtLeastOne = Annotated[int, Meta(ge=1, lt=2**31)]
Number = Annotated[int, Meta(ge=0, lt=2**31)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
Share = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
Likeliest = Annotated[int, Meta(ge=0, le=20)]
Word = Annotated[str, Meta(min_length=1, max_length=1000)]
Stop = Word | Annotated[list[Word], Meta(max_length=16)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Tokens = list[Token]

ID = "resp_"
_ID = re.compile(ID + "([0-9a-f]{64})_[0-9a-f]{16}")
_FIELD = re.compile(r"`\$\.(\w+)")

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "background": (False,),
    "best_of": (1,),
    "cache_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (False, True),
    "priority": (0,),
    "reasoning": ({},),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "suffix": ("",),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
}
"""Fields of OpenAI's and vLLM's that are not served, with their values without effect."""

RequestT = TypeVar("RequestT", bound="Request")


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream contains in addition to the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message, which is text."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class Said(Struct, forbid_unknown_fields=True):
    """A message of a chat; answers that are sent back have more fields, without effect."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    type: Literal["message"] = "message"
    name: str = ""
    id: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    annotations: list[None] = []
    tool_calls: list[None] = []

    def message(self) -> dict[str, str]:
        """The message for a template; its parts are lines, as with vLLM."""
        text = self.content
        if not isinstance(text, str):
            text = "\n".join(part.text for part in text)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Request(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all kinds of requests; those that are not sent have OpenAI's defaults.

    Attributes:
        model: The name of the model.
        temperature: See :class:`stateline.generate.Sampling`, also for the next four.
        top_p: See there.
        top_k: See there; 0 and -1 are all tokens.
        min_p: See there; 0 is all tokens.
        repetition_penalty: See there.
        presence_penalty: See :class:`stateline.generate.Penalties`, also for the next two.
        frequency_penalty: See there.
        logit_bias: See there.
        stop: Strings before which the text ends.
        stop_token_ids: Tokens before which it ends, in addition to the model's.
        ignore_eos: Whether the model's end tokens do not end it.
        min_tokens: Number of tokens before which nothing ends it.
        skip_special_tokens: Whether special tokens have no text.
        seed: Seed of the random choices, plus one for each further choice; by default random.
        n: Number of answers to a prompt.
        stream: Whether the text comes in pieces.
        cache_salt: Kept states are shared only with requests of the same salt.
    """

    model: Word
    temperature: Temperature = 1.0
    top_p: Share | None = None
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[str, Penalty], Meta(max_length=1024)] = {}
    stop: Stop = []
    stop_token_ids: Annotated[Tokens, Meta(max_length=128)] = []
    ignore_eos: bool = False
    min_tokens: Number = 0
    skip_special_tokens: bool = True
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stream: bool = False
    cache_salt: Word = ""
    metadata: dict[str, str] = {}
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""

    def rows_of(self, tokens: Sequence[int], tokenizer: Tokenizer, **more: Any) -> list[Row]:
        """The rows that continue a text; they differ in their seeds."""
        seed = secrets.randbits(62) if self.seed is None else self.seed
        return [
            self._row(tokens, tokenizer, (seed + number) % 2**63, **more)
            for number in range(self.n)
        ]

    def _row(
        self,
        tokens: Sequence[int],
        tokenizer: Tokenizer,
        seed: int,
        chat_ends: frozenset[int] = frozenset(),
        **more: Any,
    ) -> Row:
        own = frozenset() if self.ignore_eos else tokenizer.end_tokens | chat_ends
        tokenizer.check(self.stop_token_ids)
        if (most := more["new_tokens"]) is not None and self.min_tokens > most:
            raise InputError(f"min_tokens must be at most {most}, the largest number of new tokens")
        ends = own | frozenset(self.stop_token_ids)
        penalties = Penalties(
            self.presence_penalty,
            self.frequency_penalty,
            _biases(self.logit_bias, tokenizer),
            ends,
            self.min_tokens,
        )
        top_k = None if self.top_k in (0, -1) else self.top_k
        penalty, min_p = self.repetition_penalty, self.min_p or None
        return Row(
            tokens,
            sampling=Sampling(self.temperature, top_k, self.top_p, penalty, min_p),
            penalties=penalties,
            seed=seed,
            stop=self.stop,
            ends=ends,
            least=self.min_tokens,
            special=not self.skip_special_tokens,
            salt=self.cache_salt,
            **more,
        )


class CompletionRequest(Request, kw_only=True, forbid_unknown_fields=True):
    """A request to ``/v1/completions``: the texts that follow one or several prompts.

    Attributes:
        prompt: A text or its tokens, or a list of such.
        max_tokens: Largest number of new tokens.
        logprobs: Number of likeliest tokens to tell with each token.
        echo: Whether the prompt is a part of the text, and of the log-probabilities.
        add_special_tokens: Whether the tokens that begin a text are put before it.
    """

    prompt: str | list[Token | str | Tokens]
    max_tokens: Number = 16
    logprobs: Likeliest | None = None
    echo: bool = False
    add_special_tokens: bool = True
    stream_options: StreamOptions = StreamOptions()
    best_of: int | None = None

    def rows(self, tokenizer: Tokenizer) -> list[list[Row]]:
        """The rows of each prompt."""
        if self.best_of not in (None, self.n):
            raise InputError(f"best_of must be n, {self.n}, got {self.best_of}: leave it out")
        encode = tokenizer.prompt if self.add_special_tokens else tokenizer.encode
        more = {"new_tokens": self.max_tokens, "log_probs": self.logprobs}
        more["scored"] = self.echo and self.logprobs is not None
        return [
            self.rows_of(encode(one).tolist() if isinstance(one, str) else one, tokenizer, **more)
            for one in self.prompts()
        ]

    def prompts(self) -> list[str | Tokens]:
        """The prompts, each a text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [one for one in self.prompt if isinstance(one, int)]
        prompts = [one for one in self.prompt if not isinstance(one, int)]
        if tokens and prompts:
            raise InputError(
                "a list of prompts must have texts or lists of tokens, got tokens, too"
            )
        return prompts or [tokens]


class ChatRequest(Request, kw_only=True, forbid_unknown_fields=True):
    """A request to ``/v1/chat/completions``: the next message of a chat.

    Attributes:
        messages: The messages so far; the model's template writes them.
        max_tokens: Largest number of new tokens; by default as many as the server allows.
        max_completion_tokens: The same.
        logprobs: Whether log-probabilities are told.
        top_logprobs: Number of likeliest tokens to tell with each token.
        chat_template_kwargs: More variables of the template.
    """

    messages: Annotated[list[Said], Meta(min_length=1)]
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool = False
    top_logprobs: Likeliest = 0
    stream_options: StreamOptions = StreamOptions()
    chat_template_kwargs: dict[str, Any] = {}

    def rows(self, tokenizer: Tokenizer) -> list[list[Row]]:
        """The rows of the chat."""
        said = [one.message() for one in self.messages]
        text = chat_text(tokenizer, said, variables=self.chat_template_kwargs)
        more = {"new_tokens": self.max_completion_tokens or self.max_tokens}
        more["log_probs"] = self.top_logprobs if self.logprobs else None
        tokens, ends = tokenizer.encode(text).tolist(), _chat_ends(tokenizer)
        return [self.rows_of(tokens, tokenizer, chat_ends=ends, **more)]


class ResponseRequest(Request, kw_only=True, forbid_unknown_fields=True):
    """A request to ``/v1/responses``: the next turn of a conversation whose state is kept.

    Attributes:
        input: Text, messages or tokens; text is a message if the model has a template of chats.
        instructions: A message of the system before the input.
        previous_response_id: The response that this one continues.
        max_output_tokens: Largest number of new tokens.
        store: Whether the state after the response is kept, to be continued.
    """

    input: str | list[Token | Said]
    instructions: str = ""
    previous_response_id: Word | None = None
    max_output_tokens: AtLeastOne = 256
    store: bool = True
    n: Literal[1] = 1

    def rows(self, tokenizer: Tokenizer) -> list[list[Row]]:
        """The row of an input, which may continue a kept state."""
        after = self.previous_response_id
        more: dict[str, Any] = {"new_tokens": self.max_output_tokens, "store": self.store}
        more |= {"after": None if after is None else key_of(after)}
        said = self._said(tokenizer)
        if said is not None:
            ends = _chat_ends(tokenizer)
            more |= {"chat_ends": ends, "turn_end": next(iter(ends), None)}
            write = chat_text if after is None else next_turn
            tokens = tokenizer.encode(write(tokenizer, said)).tolist()
            return [self.rows_of(tokens, tokenizer, **more)]
        if isinstance(self.input, str):
            encode = tokenizer.prompt if after is None else tokenizer.encode
            return [self.rows_of(encode(self.input).tolist(), tokenizer, **more)]
        tokens = [one for one in self.input if isinstance(one, int)]
        return [self.rows_of(tokens, tokenizer, **more)]

    def _said(self, tokenizer: Tokenizer) -> list[dict[str, str]] | None:
        """The messages of a chat; ``None`` for plain text and tokens."""
        if isinstance(self.input, str):
            if not (tokenizer.chat_template or self.instructions):
                return None
            said = [{"role": "user", "content": self.input}]
        else:
            said = [one.message() for one in self.input if isinstance(one, Said)]
            if not said and not self.instructions:
                return None
            if len(said) < len(self.input):
                raise InputError("an input must be text, messages or tokens, got a list of several")
        if self.instructions and self.previous_response_id is not None:
            raise InputError("instructions begin a conversation: leave them out of further turns")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return system + said


def _chat_ends(tokenizer: Tokenizer) -> frozenset[int]:
    end = turn_end(tokenizer)
    return frozenset() if end is None else frozenset([end])


def _biases(given: dict[str, float], tokenizer: Tokenizer) -> dict[int, float]:
    """The biases by number of token."""
    wrong = next((name for name in given if not (name.isdecimal() and len(name) < 10)), None)
    if wrong is not None:
        raise InputError(f"logit_bias must have numbers of tokens as names, got {wrong[:20]!r}")
    found = {int(name): value for name, value in given.items()}
    tokenizer.check(list(found))
    return found


def response_id(key: bytes) -> str:
    """A name for a response, from which the key of its kept state can be read."""
    return f"{ID}{key.hex()}_{secrets.token_hex(8)}"


def key_of(name: str) -> bytes:
    """The key under which the state after a response is kept."""
    found = _ID.fullmatch(name)
    if found is None:
        raise InputError(f"there is no response {name[:100]!r}: give the id of one")
    return bytes.fromhex(found[1])


class RequestError(InputError):
    """A request with a field that is not served; ``param`` is its name."""

    param: str | None = None


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """Read a request; null and neutral values of fields count as if they were not sent."""
    try:
        given = msgspec.json.decode(body)
        if isinstance(given, dict):
            given = {
                name: value
                for name, value in _without_null(given).items()
                if name in kind.__struct_fields__ or value not in _NEUTRAL.get(name, ())
            }
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        refused = RequestError(
            f"the request has a field or a value that this server does not take: {error}"
        )
        found = _FIELD.search(str(error))
        refused.param = found[1] if found else None
        raise refused from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the request cannot be read: {error}") from error


def _without_null(value: Any) -> Any:
    """The value without the fields that are null, also inside."""
    if isinstance(value, dict):
        return {name: _without_null(one) for name, one in value.items() if one is not None}
    return [_without_null(one) for one in value] if isinstance(value, list) else value
