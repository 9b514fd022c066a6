"""A language model of this library as a model of transformers."""

# No ``from __future__ import annotations``: transformers reads the annotation of config_class.

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from stateline.errors import InputError
from stateline.files import write_text
from stateline.generate.reading import read_ragged
from stateline.hf.cache import StatelineCache
from stateline.hf.card import CARD, card
from stateline.hf.config import StatelineConfig
from stateline.hf.packing import text_starts
from stateline.layers.compose import checkpoint_activations
from stateline.models.factory import float32_parameters, make_empty_model
from stateline.models.inputs import check_axes
from stateline.models.language_model import LanguageModel
from stateline.settings import check_unwrapped

_REFUSED = {
    "output_hidden_states": "hidden states are not returned: use stateline's own model",
    "shift_labels": "labels are shifted here: give labels",
    "output_attentions": "attention weights are not returned: leave it out",
}


class StatelineForCausalLM(PreTrainedModel, GenerationMixin):
    """A :class:`~stateline.LanguageModel` behind the interface of transformers.

    Rows may be padded on either side: no layer reads padding before a token, so every row gets
    exactly what it would get alone. ``generate`` goes on after the last column, so its prompts are
    padded on the left. ``past_key_values`` is a :class:`StatelineCache`.
    """

    config_class = StatelineConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]

    def __init__(self, config: StatelineConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.model_config())
        self._built_on_meta = self.model.embedding.weight.is_meta
        self._no_split_modules = sorted({type(part).__name__ for part in self.model.stack.links})
        self._keep_in_fp32_modules_strict = float32_parameters(self)
        self.post_init()

    def forward(  # noqa: PLR0913 (Trainer drops columns that are not named arguments)
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StatelineCache | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        inputs_embeds: Float[Tensor, "batch length d_model"] | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next token, as other causal models of transformers return them.

        Args:
            input_ids: Tokens; with a cache, only the tokens after the cached ones.
            attention_mask: 1 for tokens, 0 for padding, for these columns or for all so far.
            past_key_values: Cache to continue from; it is changed.
            labels: Targets, -100 where there is none; logits at a position predict the next label.
                The first token of a row has no prediction, also if padding stands before it.
            use_cache: Return a cache; by default in evaluation mode.
            logits_to_keep: Compute logits of this many last positions only, 0 for all; or the
                positions to keep.
            return_dict: ``False`` for a tuple.
            position_ids: For packed rows, positions that start from 0 in each text: each text is
                read as if it were alone, and its first token has no prediction. For rows of one
                text they are redundant; with padding they count only its tokens.
            seq_idx: Marks the texts of packed rows by the number of each token's text.
            cu_seq_lens_q: Marks the texts of one packed row by their borders.
            inputs_embeds: Embeddings in the place of ``input_ids``.
            **kwargs: ``num_items_in_batch`` for the loss. Arguments that would change the result,
                such as ``output_attentions``, are refused; all others are ignored.

        Raises:
            InputError: If something that is not supported is asked for.
        """
        _refuse(kwargs)
        if inputs_embeds is not None and input_ids is None:
            self.model.check_values(inputs_embeds)
            ids, tokens = torch.zeros_like(inputs_embeds[..., 0], dtype=torch.int64), inputs_embeds
        elif input_ids is not None and inputs_embeds is None:
            check_axes(input_ids, "batch", "length")
            ids, tokens = input_ids, self._tokens(input_ids)
        else:
            raise InputError(
                "the model reads tokens or embeddings: give either input_ids or inputs_embeds"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = _cache(past_key_values, use_cache)
        mask = _mask(attention_mask, ids, cache)
        fresh = cache is None or not cache.seen
        starts = text_starts(ids, mask, position_ids, seq_idx, cu_seq_lens_q, fresh=fresh)
        keep = None
        if isinstance(logits_to_keep, int) and logits_to_keep and labels is None:
            keep = logits_to_keep
        if cache is None:
            logits = self._forward_whole(tokens, mask, keep, starts)
        else:
            logits = self._forward_cached(tokens, mask, cache, keep, starts)
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            if starts is not None:
                labels = labels.masked_fill(starts, -100)
            loss = self._loss(logits, labels, mask, kwargs.get("num_items_in_batch"))
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output.to_tuple() if return_dict is False else output

    def _tokens(self, input_ids: Tensor) -> Tensor:
        """The tokens; padding tokens outside the vocabulary become 0, their logits are unused."""
        for pad in {self.config.pad_token_id, self.generation_config.pad_token_id} - {None}:
            if pad >= self.config.vocab_size:
                input_ids = input_ids.masked_fill(input_ids == pad, 0)
        return input_ids

    def _forward_whole(
        self, tokens: Tensor, mask: Tensor | None, keep: int | None, starts: Tensor | None
    ) -> Tensor:
        if mask is None:
            return self.model(tokens, keep=keep, starts=starts)
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # tokens first, then padding
        each = (..., *[None] * (tokens.ndim - 2))  # embeddings have an axis more
        first = tokens.gather(1, order[each].expand_as(tokens))
        logits = self.model(first.masked_fill(~mask.gather(1, order)[each], 0))
        order = order[..., None].expand_as(logits)
        return _last_columns(torch.zeros_like(logits).scatter(1, order, logits), keep)

    def _forward_cached(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        cache: StatelineCache,
        keep: int | None,
        starts: Tensor | None,
    ) -> Tensor:
        if starts is mask is None and tokens.shape[1] == 1 and cache.steps_in_place:
            return cache.step(self.model, tokens[:, 0])[:, None]
        state, columns = cache.prepare(self.model, len(tokens)), tokens.shape[1]
        if mask is None:
            options: dict[str, Any] = {"keep": keep, "starts": starts}
            logits, state = self.model.forward_chunk(tokens, state, **options)
            cache.advance(state, columns, tokens)
            return logits
        rows = [row[real] for row, real in zip(tokens, mask, strict=True)]
        compact = keep is not None and bool(mask[:, -keep:].all())
        found, state = read_ragged(self.model, rows, state, keep=keep if compact else None)
        cache.advance(state, columns, rows[0][None])  # only a batch of one row is ever recorded
        if compact:
            return torch.stack(found)
        logits = found[0].new_zeros(*mask.shape, self.config.vocab_size)
        logits[mask] = torch.cat(found)
        return _last_columns(logits, keep)

    def _loss(
        self, logits: Tensor, labels: Tensor, mask: Tensor | None, n_items: Any
    ) -> Float[Tensor, ""]:
        if mask is not None:  # the first token after padding would be predicted from padding
            labels = labels.masked_fill(nn.functional.pad(~mask[:, :-1], (1, 0)), -100)
        size = self.config.vocab_size
        return self.loss_function(
            logits=logits, labels=labels, vocab_size=size, num_items_in_batch=n_items
        )

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Fill what a file does not hold, after ``from_pretrained`` built the model on meta.

        These are buffers that are not saved, and missing parameters. A model that was not built on
        meta already has the initial values of this library, and keeps them.
        """
        tensors = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        missing = [
            name
            for name, tensor in tensors.items()
            if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False)
        ]
        if not self._built_on_meta or not missing:
            return
        drawn = not self.model.state_dict().keys().isdisjoint(missing)
        with torch.device("cpu"):
            config = self.model.config
            fresh = LanguageModel(config) if drawn else make_empty_model(config)
        values = dict([*fresh.named_parameters(), *fresh.named_buffers()])
        for name in missing:
            tensors[name].copy_(values[name])

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write the model, see transformers; with a model card if the folder has none."""
        super().save_pretrained(save_directory, *args, **kwargs)
        place = Path(save_directory) / CARD
        if kwargs.get("is_main_process", True) and not place.exists():
            write_text(place, card(self.model))

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.model.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module | None:
        """The output map; ``None`` if it is the embedding."""
        return self.model.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the output map."""
        self.model.head = value  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Change the size of the vocabulary; see transformers."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        size = embedding.num_embeddings
        self.model.config = dataclasses.replace(self.model.config, vocab_size=size)
        self.config.vocab_size = size
        return embedding

    def _set_gradient_checkpointing(self, enable: bool = True, **_: Any) -> None:
        checkpoint_activations(self.model.stack, enable)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        return self.model.stack.checkpoints_activations

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:
        """None: positions are part of the state, and ``attention_mask`` marks padding."""

    def init_continuous_batching(self, *_: Any, **__: Any) -> None:
        """Refused.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "continuous batching of transformers needs pages of keys and values, and this model "
            "has a state of its own: use generate, or stateline serve"
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        mask, drafts = model_kwargs.get("attention_mask"), generation_config.is_assistant
        # A draft may end with the token of padding, and is compared with what the model writes.
        if mask is not None and not drafts and not bool(mask[:, -1:].all()):
            raise InputError(
                "a text goes on after its last column, and attention_mask ends with padding there: "
                "pad prompts on the left, with tokenizer.padding_side='left'"
            )
        given = model_kwargs.get("past_key_values")
        if given is not None:
            given._is_user_defined = True
            return
        if generation_config.assistant_early_exit is not None:
            raise InputError(
                "this model has no outputs after some of its layers, got assistant_early_exit: "
                "give an assistant_model"
            )
        if generation_config.use_cache is False:
            return
        if (kind := generation_config.cache_implementation) not in (None, "dynamic"):
            raise InputError(
                f"this model has a state of its own, got cache_implementation={kind}: leave it out"
            )
        model_kwargs["past_key_values"] = StatelineCache()
        if drafts:
            model_kwargs["past_key_values"].activate_past_recording()


def wrap(model: LanguageModel, **settings: Any) -> StatelineForCausalLM:
    """A model of transformers that shares its tensors with a language model.

    ``settings`` are settings of transformers, such as ``eos_token_id``.

    Raises:
        InputError: If the model is of another class, such as one that is wrapped already.
    """
    check_unwrapped("model", model)
    if not isinstance(model, LanguageModel):
        raise InputError(
            f"model must be a LanguageModel of Stateline, got {type(model).__name__}: read one "
            "with stateline.load_model, or use a model of transformers as it is"
        )
    with torch.device("meta"):
        wrapped = StatelineForCausalLM(StatelineConfig.of(model.config, **settings))
    wrapped.model, wrapped._built_on_meta = model, False
    wrapped.config.dtype = wrapped.dtype
    return wrapped.train(model.training)


def _refuse(given: Mapping[str, Any]) -> None:
    """Raise InputError for what other models of transformers take and this one does not."""
    for name, reason in _REFUSED.items():
        if given.get(name) is not None and given[name] is not False:
            raise InputError(f"{name} cannot be used with this model: {reason}")


def _cache(given: Any, use_cache: bool) -> StatelineCache | None:
    """The cache to continue from, or a new one if it is wanted."""
    if given is None:
        return StatelineCache() if use_cache else None
    if not isinstance(given, StatelineCache):
        raise InputError(
            "past_key_values must be a StatelineCache, which this model returns, got "
            f"{type(given).__name__}: leave it out for a new one"
        )
    return given


def _mask(
    attention_mask: Tensor | None, ids: Tensor, cache: StatelineCache | None
) -> Bool[Tensor, "batch columns"] | None:
    """Where tokens are; ``None`` if there is no padding."""
    if attention_mask is None:
        return None
    rows, columns, seen = *ids.shape, 0 if cache is None else cache.seen
    found, wanted = tuple(attention_mask.shape), (rows, columns)
    if found not in (wanted, (rows, seen + columns)):
        cached = f" or {(rows, seen + columns)} with the columns of the cache" if seen else ""
        raise InputError(
            f"attention_mask must have the shape (batch, length), {wanted}{cached}, got {found}: "
            "a causal model needs no other"
        )
    mask = attention_mask[:, found[-1] - columns :].bool()
    return None if bool(mask.all()) else mask


def _last_columns(logits: Tensor, keep: int | None) -> Tensor:
    return logits if keep is None else logits[:, -keep:]
