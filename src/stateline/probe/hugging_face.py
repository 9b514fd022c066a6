"""Models of the package transformers, as readers of prompts; nothing else here imports it."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.files import user_path
from stateline.generate.hugging_face import HUGGING_FACE, transformers_package
from stateline.hf_check import padding_error, steps_error
from stateline.hf_check.load import load_hugging_face
from stateline.probe.network import HuggingFaceNetwork, Network
from stateline.probe.reader import Reader, Tokens

LIMIT = 0.05
"""Relative error of logits above which rows are not padded, or not batched."""

_TAIL = 8
"""Number of last tokens in which a stop string is searched."""


class HuggingFaceReader(Reader):
    """A causal language model that ``transformers`` reads.

    Prompts of different lengths are padded on the left, with a mask, if the model gives the same
    logits with padding. Otherwise only prompts of one length share a call, or, if rows change each
    other's logits, every prompt has its own call. This is measured once, on random tokens. If
    rows need more learned positions together than the model has, they are not padded, either.

    Args:
        spec: ``hf:`` and a folder.
        tokenizer: Tokenizer file or folder instead of the model's own.
        device: Device of the weights.
        dtype: Precision of the weights; by default that in which they were saved.

    Attributes:
        batching: ``padded``, ``equal lengths`` or ``single rows``.
    """

    def __init__(
        self,
        spec: str,
        *,
        tokenizer: str | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        folder = user_path(spec.removeprefix(HUGGING_FACE), "model")
        self.name = spec
        self.model = load_hugging_face(folder, device=device, dtype=dtype)
        self.tokenizer = _load_tokenizer(folder, tokenizer)
        config = self.model.config.get_text_config()
        if (size := _vocab_size(self.tokenizer)) > config.vocab_size:
            raise InputError(
                f"the tokenizer has {size} tokens, but the model in {folder} "
                f"{config.vocab_size}: give the model's own with --tokenizer"
            )
        self.max_len = config.max_position_embeddings if _learned_positions(self.model) else None
        named = self.model.generation_config.eos_token_id
        named = self.tokenizer.eos_token_id if named is None else named
        self.end = frozenset([named] if isinstance(named, int) else named or ())
        self.batching = _batching(self.model)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, with the special tokens that the tokenizer adds."""
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens, as it is."""
        return self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)

    def answer(
        self, prompts: Sequence[Tokens], new_tokens: Sequence[int], stop: str, *, never_empty: bool
    ) -> list[str]:
        """Continue prompts with ``generate``."""
        answers = [""] * len(prompts)
        for rows in self._groups(prompts, new_tokens):
            limits = [new_tokens[row] for row in rows]
            made = self._generate([prompts[row] for row in rows], limits, stop, never_empty)
            for row, tokens in zip(rows, made.tolist(), strict=True):
                answers[row] = self._text(tokens, new_tokens[row]).split(stop)[0]
        return answers

    def network(self) -> Network:
        """The layers of the model."""
        return HuggingFaceNetwork(self.model)

    def _finished(self, tokens: Tokens, limit: int, stop: str) -> bool:
        """Whether no further token can change an answer."""
        return (
            len(tokens) >= limit
            or tokens[-1] in self.end
            or stop in self.decode(list(tokens[-_TAIL:]))
        )

    def _text(self, tokens: Tokens, limit: int) -> str:
        """The text of new tokens up to the limit or to an end token."""
        kept = list(tokens[:limit])
        ends = (place for place, token in enumerate(kept) if token in self.end)
        return self.decode(kept[: next(ends, len(kept))])

    def _groups(self, prompts: Sequence[Tokens], limits: Sequence[int]) -> list[list[int]]:
        """Rows that may share a call, in which each takes as many positions as the longest."""
        positions = max(map(len, prompts)) + max(limits)
        if self.batching == "padded" and (self.max_len is None or positions <= self.max_len):
            return [list(range(len(prompts)))]
        if self.batching == "single rows":
            return [[row] for row in range(len(prompts))]
        groups: dict[int, list[int]] = defaultdict(list)
        for row, prompt in enumerate(prompts):
            groups[len(prompt)].append(row)
        return list(groups.values())

    def _generate(
        self, prompts: Sequence[Tokens], limits: Sequence[int], stop: str, never_empty: bool
    ) -> Tensor:
        """The new tokens; after the end of a row there is padding."""
        package, length = transformers_package(), max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])

        def finished(read: Tensor, _: object, **__: object) -> Tensor:
            rows = zip(read[:, length:].tolist(), limits, strict=True)
            done = [self._finished(tokens, limit, stop) for tokens, limit in rows]
            return torch.tensor(done, device=read.device)

        settings = package.GenerationConfig(
            max_new_tokens=max(limits),
            min_new_tokens=1 if never_empty else None,
            do_sample=False,
            eos_token_id=sorted(self.end) or None,
            pad_token_id=min(self.end, default=0),
        )
        with torch.inference_mode():
            made = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                generation_config=settings,
                stopping_criteria=package.StoppingCriteriaList([finished]),
            )
        return made[:, length:]


def _learned_positions(model: Any) -> bool:
    """Whether a model has a table of positions: an embedding other than the token embedding."""
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return any(table is not model.get_input_embeddings() for table in tables)


def _vocab_size(tokenizer: Any) -> int:
    """The largest token plus one; the padding token is never given to the model."""
    numbers = tokenizer.get_vocab().items()
    return 1 + max(number for token, number in numbers if token != tokenizer.pad_token)


def _batching(model: Any) -> str:
    """The largest batches that a model reads as it reads single rows."""
    if padding_error(model) <= LIMIT:
        return "padded"
    return "equal lengths" if steps_error(model) <= LIMIT else "single rows"


def _load_tokenizer(folder: Path, given: str | None) -> Any:
    package = transformers_package()
    path = user_path(given, "tokenizer") if given else folder
    try:
        if path.is_file():
            return package.PreTrainedTokenizerFast(tokenizer_file=str(path))
        tokenizer = package.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        tokenizer("a")  # settings of a wrong type are noticed only here
        return tokenizer
    except Exception as error:  # the package may raise any exception
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"transformers cannot read a tokenizer from {path}: {reason}; name one with --tokenizer"
        ) from error
