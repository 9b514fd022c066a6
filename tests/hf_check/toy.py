"""A recurrence behind the interface of transformers, with faults to be found."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

FAULTS = {
    "drops a token": "chunks",
    "forgets the state in a chunk": "chunks",
    "mixes rows": "whole",
    "sees the future": "whole",
    "ignores the mask": "padding",
    "does not reorder": "beams",
    "does not take back": "rollback",
    "keeps the state in the model": "copies",
    "reads on across borders": "packed",
}
"""Faults, and a kind of call that each makes wrong."""


class ToyConfig(PretrainedConfig):
    model_type = "toy_recurrence"
    vocab_size = 64
    hidden_size = 16


class ToyCache:
    """The state of each row, and the states before the last steps."""

    is_compileable, is_croppable = False, True

    def __init__(self, state: Tensor) -> None:
        self.past = [state]
        self.reorders = self.crops = True

    def get_seq_length(self, layer: int = 0) -> int:
        return len(self.past) - 1

    def reorder_cache(self, rows: Tensor) -> None:
        if self.reorders:
            self.past = [state[rows] for state in self.past]

    def activate_past_recording(self) -> None:
        """All states are recorded anyway."""

    def crop(self, by: int) -> None:
        if self.crops:
            del self.past[by:]


class Toy(PreTrainedModel, GenerationMixin):
    """h_t = 0.9 h_{t-1} + tanh(e(x_t) + 0.3 h_{t-1}), logits = W h_t."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig, fault: str = "") -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.fault, self.kept = fault, None
        self.post_init()
        nn.init.normal_(self.embedding.weight)
        nn.init.normal_(self.head.weight)

    def _supports_default_dynamic_cache(self) -> bool:
        return False

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """The first forward makes the cache."""

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: ToyCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        x, length = self.embedding(input_ids), input_ids.shape[1]
        new = past_key_values is None
        cache = ToyCache(x.new_zeros(len(x), x.shape[2])) if new else past_key_values
        cache.reorders = self.fault != "does not reorder"
        cache.crops = self.fault != "does not take back"
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask[:, -length:, None].to(x.dtype)
        if self.fault == "sees the future":
            x = x + x.roll(-1, dims=1)
        if self.fault == "forgets the state in a chunk" and not new and length > 1:
            cache.past[-1] = torch.zeros_like(cache.past[-1])
        if self.fault == "keeps the state in the model":
            self.kept = cache.past[-1] if new else self.kept
            cache.past[-1] = self.kept
        outputs = []
        for t in range(length):
            if new and t and self.fault != "reads on across borders":
                self._begin(t, cache, **others)
            outputs.append(self._step(x[:, t], mask[:, t], cache))
        if self.fault == "drops a token" and not new and length > 1:
            cache.past[-1] = cache.past[-2]
        self.kept = cache.past[-1]
        logits = self.head(torch.stack(outputs, dim=1))
        return CausalLMOutputWithPast(
            logits=logits, past_key_values=cache if use_cache is not False else None
        )

    def _begin(self, t: int, cache: ToyCache, position_ids: Tensor | None = None, **_: Any) -> None:
        """Forget where a text of a packed row begins."""
        if position_ids is not None:
            cache.past[-1] = cache.past[-1] * (position_ids[:, t, None] > 0)

    def _step(self, x: Tensor, mask: Tensor, cache: ToyCache) -> Tensor:
        before = cache.past[-1]
        after = 0.9 * before + (x + 0.3 * before).tanh()
        if self.fault == "mixes rows":
            after = after + 0.1 * after.mean(dim=0)
        keep = torch.ones_like(mask) if self.fault == "ignores the mask" else mask
        cache.past.append(torch.where(keep > 0, after, before))
        return cache.past[-1]


def toy(fault: str = "") -> Toy:
    torch.manual_seed(0)
    return Toy(ToyConfig(), fault).eval()
