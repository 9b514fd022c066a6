"""Models of this library in lm-evaluation-harness."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import groupby, takewhile
from logging import getLogger
from operator import itemgetter
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from stateline.data import Tokenizer
from stateline.data.chat import chat_text
from stateline.errors import InputError
from stateline.evaluate.text import score_text
from stateline.generate import answer, load_run, read_ragged
from stateline.layers import select_rows
from stateline.models.language_model import LanguageModel
from stateline.models.likelihood import token_losses
from stateline.settings import INT64

log = getLogger("stateline.evaluate")

NEW_TOKENS = 256
"""Largest number of tokens that are written if a task sets no limit."""

_KNOWN = {
    *("until", "max_gen_toks", "min_new_tokens", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p"),  # have no effect on greedy texts
}
"""Settings of written texts that are read."""

Scored = tuple[float, bool]
"""Log-likelihood in nats, and whether every token was the likeliest."""

Request = tuple[Any, list[int], list[int]]
"""Texts, tokens of the context, and tokens that follow."""


@register_model("stateline")
class StatelineLM(TemplateLM):
    """A language model that reads each context once and forks its state for each continuation.

    Args:
        model: The model; by default it is read from ``path``.
        tokenizer: Its tokenizer.
        path: Folder of a run or a published model, for ``lm_eval.simple_evaluate("stateline",
            "path=FOLDER", ...)``; a tokenizer's path or ``byte`` may be given with it. lm-eval
            knows the name once this module is imported, so its command does not.
        batch_size: Contexts that are read together.
        device: Device of a model that is read from ``path``.
        max_length: Longest text that is read, in tokens; by default as the model was made for, or
            as it was trained on. 0 is any length. HFLM takes 2,048 where a model says nothing.

    Attributes:
        limit: The same; ``None`` for any length.
        tokens_read: Tokens that the model has read so far.

    Raises:
        InputError: If there is neither a model with a tokenizer nor a path, ``batch_size`` is no
            number, or the model cannot read texts of ``max_length``.
    """

    backend = "causal"

    def __init__(
        self,
        model: LanguageModel | None = None,
        tokenizer: Tokenizer | str | None = None,
        *,
        path: str | None = None,
        batch_size: int | str = 8,
        device: str | None = None,
        max_length: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if path is not None:
            named = tokenizer if isinstance(tokenizer, str) else None
            model, tokenizer = load_run(path, device=device or "cpu", tokenizer=named)
        if model is None or not isinstance(tokenizer, Tokenizer):
            raise InputError("StatelineLM needs a model and a tokenizer, or path=FOLDER of a run")
        if not str(batch_size).isdecimal() or int(batch_size) == 0:
            raise InputError(f"batch_size must be a number of contexts, got {batch_size!r}")
        self.model, self.text, self.batch_size = model, tokenizer, int(batch_size)
        # as HFLM, which reads no text beyond max_position_embeddings
        own = model.config.trained_len if model.max_len is None else model.max_len
        self.limit = own if max_length is None else max_length or None
        if model.max_len is not None and (self.limit or INT64[-1]) > model.max_len:
            raise InputError(
                f"the model was made for {model.max_len:,} tokens, got max_length={max_length}: "
                "lower it"
            )
        self.tokens_read = 0

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token, or else the newline token, or else 0."""
        if self.text.end_of_text is not None:
            return self.text.end_of_text
        try:
            return int(self.text.encode("\n")[-1])
        except InputError:
            return 0

    @property
    def prefix_token_id(self) -> int:
        """The token before a text: the one that begins texts, or else ``eot_token_id``."""
        begin = self.text.begin_of_text
        return self.eot_token_id if begin is None else begin

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The tokens of a text, by default after those that begin one."""
        encode = self.text.encode if add_special_tokens is False else self.text.prompt
        tokens: list[int] = encode(string).tolist()
        return tokens

    @property
    def tokenizer_name(self) -> str:
        """Of lm-eval's interface: it names files of prepared requests, which are not used here."""
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat, by the model's template; else its last message is left unfinished.

        A template that takes no message of the system gets none, as in HFLM.
        """
        write = partial(chat_text, self.text, prompt=add_generation_prompt)
        try:
            text = write(chat_history)
        except InputError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            log.warning("the template of chats takes no message of the system: it is left out")
            text = write(others)
        return text if add_generation_prompt else _unfinished(text, chat_history[-1]["content"])

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[Scored]:
        by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_texts, context, continuation) in enumerate(requests):
            known = context or [self.prefix_token_id]  # of a context of white space nothing is left
            # the last token is not read
            by_context[self._fitting(known, len(continuation) - 1)].append(number)
        results: dict[int, Scored] = {}
        contexts = sorted(by_context)  # contexts with a long common prefix are neighbours
        for first in range(0, len(contexts), self.batch_size):
            batch = contexts[first : first + self.batch_size]
            forks = [(row, number) for row, c in enumerate(batch) for number in by_context[c]]
            results |= self._score(batch, forks, requests)
        for number, (texts, *_rest) in enumerate(requests):
            self.cache_hook.add_partial("loglikelihood", texts, results[number])
        return [results[number] for number in range(len(requests))]

    def _fitting(self, context: Sequence[int], following: int) -> tuple[int, ...]:
        """The end of a context that the model can read before ``following`` further tokens."""
        if self.limit is None:
            return tuple(context)
        if following >= self.limit:
            raise InputError(
                f"texts of up to {self.limit} tokens are read, got {following} after a context: "
                "leave out this task"
            )
        return tuple(context[following - self.limit :])

    def _score(
        self,
        contexts: Sequence[tuple[int, ...]],
        forks: Sequence[tuple[int, int]],
        requests: Sequence[Request],
    ) -> dict[int, Scored]:
        """Scores by number of request; a fork is a context's row and the number of a request."""
        same = takewhile(lambda column: len(set(column)) == 1, zip(*contexts, strict=False))
        shared = min(len(list(same)), min(map(len, contexts)) - 1)
        _, state = self._read([contexts[0][:shared]], self.model.init_state(1), keep=0)
        state = select_rows(state, [0] * len(contexts))
        before, state = self._read([context[shared:] for context in contexts], state, keep=1)
        results = {}
        for first in range(0, len(forks), self.batch_size):
            part = forks[first : first + self.batch_size]
            wanted = [requests[number][2] for _, number in part]
            forked = select_rows(state, [row for row, _ in part])
            after, _ = self._read([tokens[:-1] for tokens in wanted], forked)
            for (row, number), tokens, logits in zip(part, wanted, after, strict=True):
                results[number] = _likelihood(torch.cat([before[row], logits]), tokens)
        return results

    def _read(
        self, rows: Sequence[Sequence[int]], state: Any, keep: int | None = None
    ) -> tuple[list[Tensor], Any]:
        self.tokens_read += sum(map(len, rows))
        tokens = [self._tensor(row) for row in rows]
        return read_ragged(self.model, tokens, state, keep=keep)

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.model.device)

    @torch.inference_mode()
    def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
        """Log-likelihoods of whole texts.

        The state is carried through a text. A model with a maximum length scores windows instead,
        each from an empty state. As in HFLM, a token that begins texts is scored, too, after the
        same token.
        """
        results = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            total = self._carried(tokens) if self.limit is None else self._windowed(tokens)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            results.append(total)
        return results

    def _carried(self, tokens: list[int]) -> float:
        self.tokens_read += len(tokens)
        text = self._tensor([self.prefix_token_id, *tokens])
        return -sum(score_text(self.model, [text]).losses.sums.values()) if tokens else 0.0

    def _windowed(self, tokens: list[int]) -> float:
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.limit, 1)
        requests: list[Request] = [("", *make_disjoint_window(window)) for window in windows]
        return sum(likelihood for likelihood, _ in self._loglikelihood_tokens(requests))

    @torch.inference_mode()
    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        """The most likely texts after contexts, up to a stop string.

        Raises:
            InputError: If a task wants texts to be sampled.
        """
        texts = list[str]()
        for settings, group in groupby((request.args for request in requests), itemgetter(1)):
            contexts = [context for context, _ in group]
            for first in range(0, len(contexts), self.batch_size):
                texts += self._write(contexts[first : first + self.batch_size], settings)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _write(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        settings = normalize_gen_kwargs(dict(settings), default_max_gen_toks=NEW_TOKENS)
        if settings.get("do_sample"):
            raise InputError("texts are written greedily here: leave out tasks with do_sample")
        for name, value in settings.items():
            if name not in _KNOWN and (name, value) != ("num_beams", 1):
                raise InputError(
                    f"generation_kwargs has {name}={value!r:.40}, which is not supported: leave "
                    "out this task"
                )
        until = [stop for stop in handle_stop_sequences(settings.get("until"), eos=None) if stop]
        longest = settings["max_gen_toks"]
        rows = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        prompts = [self._fitting(row, longest) for row in rows]
        self.tokens_read += sum(map(len, prompts))
        return answer(
            self.model,
            self.text,
            prompts,
            [longest] * len(prompts),
            stop=until,
            end=self.text.end_tokens,
            least=settings.get("min_new_tokens") or 0,
        )


def _unfinished(text: str, said: str) -> str:
    """A text up to the end of what was said last, with its spaces if the template keeps them."""
    start = text.rfind(said.strip())
    if start < 0:
        raise InputError("the template of chats changes answers: leave out tasks with gen_prefix")
    kept = text[start:].startswith(said.lstrip())
    return text[: start + len(said.lstrip() if kept else said.strip())]


def _likelihood(logits: Tensor, wanted: Sequence[int]) -> Scored:
    tokens = torch.tensor(wanted, device=logits.device)
    losses = token_losses(logits[None], tokens[None])
    greedy = bool((logits.argmax(dim=-1) == tokens).all())
    return -float(losses.double().sum()), greedy
