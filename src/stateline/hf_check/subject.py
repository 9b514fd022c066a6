"""A Hugging Face model, called as ``generate`` calls it, or plainly."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_NAMES = ("past_key_values", "cache_params", "state")
"""Names under which models return their cache."""


class Cache(NamedTuple):
    """A cache, and the name of the argument that takes it."""

    name: str
    value: Any


class Subject:
    """Ways to run a model.

    Args:
        model: A causal language model of ``transformers``, in evaluation mode.
        plain: Call ``forward`` only with tokens, cache and mask, instead of the arguments that the
            model's own ``prepare_inputs_for_generation`` returns.
    """

    def __init__(self, model: Any, *, plain: bool = False) -> None:
        self.model, self.plain = model, plain
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.vocab_size: int = model.config.get_text_config().vocab_size

    def whole(
        self,
        ids: Int[Tensor, "batch length"],
        mask: Int[Tensor, "batch length"] | None = None,
        **given: Any,
    ) -> Float[Tensor, "batch length vocab"]:
        """The logits of one call over the whole text, without a cache."""
        given |= {} if mask is None else {"attention_mask": mask}
        if mask is not None and self._takes_positions:
            given["position_ids"] = _positions(mask)
        return self.model(ids, use_cache=False, **given).logits

    def run(
        self,
        ids: Int[Tensor, "batch length"],
        sizes: Sequence[int],
        cache: Cache | None = None,
        *,
        mask: Int[Tensor, "batch length"] | None = None,
        start: int = 0,
    ) -> tuple[Float[Tensor, "batch read vocab"], Cache]:
        """Read a text in chunks.

        Args:
            ids: The whole text, including what the cache has read.
            sizes: Tokens of each call.
            cache: Cache that an earlier run returned.
            mask: Zero at padding, for the whole text.
            start: Tokens that the cache has read.

        Returns:
            The logits of the tokens that were read, and the cache.
        """
        logits = []
        for size in sizes:
            seen = None if mask is None else mask[:, : start + size]
            known = cache or (None if self.plain else self._first_cache(ids))
            given = self._arguments(ids, start, size, known, seen)
            out = self.model(**given, return_dict=True)
            cache = _returned(out) or known
            if cache is None:
                raise RuntimeError("no cache comes back")
            if out.logits.shape[1] < size:
                raise RuntimeError(f"{out.logits.shape[1]} logits for {size} tokens")
            logits.append(out.logits[:, -size:])
            start += size
        assert cache is not None
        return torch.cat(logits, dim=1), cache

    def _first_cache(self, ids: Tensor) -> Cache | None:
        """The cache that ``generate`` makes before the first call, if it makes one."""
        from transformers.generation import GenerationMode

        settings = copy.copy(self.model.generation_config)
        settings.use_cache, settings.cache_implementation = True, None
        made: dict[str, Any] = {}
        mode = GenerationMode.GREEDY_SEARCH
        self.model._prepare_cache_for_generation(settings, made, mode, *ids.shape)
        return next((Cache(name, value) for name, value in made.items() if name in _NAMES), None)

    def _arguments(
        self, ids: Tensor, start: int, size: int, cache: Cache | None, seen: Tensor | None
    ) -> dict[str, Any]:
        """Arguments of the call that reads the next tokens."""
        given: dict[str, Any] = {"use_cache": True}
        given |= {} if cache is None else {cache.name: cache.value}
        read = ids[:, : start + size]
        if self.plain:
            mask = {} if seen is None else {"attention_mask": seen}
            return {"input_ids": read[:, start:], **given, **mask}
        if self._takes_positions:
            given["position_ids"] = _positions(torch.ones_like(read) if seen is None else seen)
        ready = self.model.prepare_inputs_for_generation(
            read,
            next_sequence_length=size if start else None,
            is_first_iteration=start == 0,
            attention_mask=seen,
            **given,
        )
        if "logits_to_keep" in ready:  # some models ask for the last logits alone
            ready["logits_to_keep"] = 0
        return ready


def _returned(out: Any) -> Cache | None:
    """The cache in a model's output; some models change the given one instead."""
    found = ((name, getattr(out, name, None)) for name in _NAMES)
    return next((Cache(name, value) for name, value in found if value is not None), None)


def _positions(mask: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    """Positions that do not count padding."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
