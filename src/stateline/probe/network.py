"""A language model cut into its layers, so that a changed layer does not run those below again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import AnyLayer
from stateline.layers.mixers.heads import SoftmaxHeads
from stateline.models.language_model import LanguageModel

Stream = Float[Tensor, "rows length d_model"]
Tokens = Int[Tensor, "rows length"]


class Heads(NamedTuple):
    """The heads of a mixer: equal parts of the input of its last map.

    Attributes:
        last: The last map.
        number: Number of heads.
        width: Entries of a head.
        attention: The mixer, if its heads can see fewer positions.
    """

    last: nn.Module
    number: int
    width: int
    attention: SoftmaxHeads | None = None


class Network(ABC):
    """A model as its layers, one after the other; they are run without gradients.

    Attributes:
        mixers: For each layer, the groups of heads of its mixers; none for a feed-forward.
        device: Device of the model.
    """

    mixers: Sequence[Sequence[Heads]]
    device: torch.device

    @abstractmethod
    def enter(self, tokens: Tokens) -> Stream:
        """The input of the first layer."""

    @abstractmethod
    def advance(self, layer: int, stream: Stream, tokens: Tokens) -> Stream:
        """The output of a layer, from its input."""

    def within(
        self, layer: int, window: int, stream: Stream, tokens: Tokens
    ) -> list[Float[Tensor, "rows length width"]]:
        """The inputs of a layer's last maps, from its input, where heads see few positions.

        They are zero for heads that cannot.
        """
        groups = self.mixers[layer]
        inputs = dict[nn.Module, Tensor]()
        with ExitStack() as hooks:
            for module in (m for heads in groups for m in (heads.last, heads.attention)):
                if module is not None:
                    keep = module.register_forward_pre_hook(partial(_keep, inputs))
                    hooks.callback(keep.remove)
            self.advance(layer, stream, tokens)
            for heads in groups:
                if heads.attention is None:
                    inputs[heads.last] = torch.zeros_like(inputs[heads.last])
                else:
                    near = heads.attention.within(window)
                    assert near is not None
                    near(inputs[heads.attention])
        return [inputs[heads.last] for heads in groups]

    @abstractmethod
    def finish(
        self, layer: int, stream: Stream, tokens: Tokens, asked: Bool[Tensor, "rows length"]
    ) -> Float[Tensor, "asked vocab"]:
        """Logits at some positions, from the input of a layer."""


def _keep(inputs: dict[nn.Module, Tensor], module: nn.Module, given: tuple[Tensor, ...]) -> None:
    inputs[module] = given[0]


@contextmanager
def silenced(
    heads: Sequence[Heads],
    kept: Float[Tensor, "rows head"],
    others: Sequence[Float[Tensor, "rows length width"]] = (),
) -> Iterator[None]:
    """Multiply the output of each head of a layer in each row by a number: 0 silences it.

    With ``others``, the inputs of the last maps are moved towards these instead of zero.
    """
    with ExitStack() as hooks:
        parts = kept.split([group.number for group in heads], dim=1)
        for index, (group, part) in enumerate(zip(heads, parts, strict=True)):
            factors = part.repeat_interleave(group.width, dim=1)[:, None]
            other = others[index] if others else None
            hook = group.last.register_forward_pre_hook(_mix(factors, other))
            hooks.callback(hook.remove)
        yield


def _mix(
    factors: Tensor, other: Tensor | None
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def mixed(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept = inputs[0] * factors.to(inputs[0])
        rest = 0.0 if other is None else other * (1 - factors).to(other)
        return kept + rest, *inputs[1:]

    return mixed


class StatelineNetwork(Network):
    """A model of Stateline."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.links = model, model.stack.links
        self.device = model.device
        self.mixers = [_own_heads(link) for link in self.links]

    def enter(self, tokens: Tokens) -> Stream:
        """The embedded tokens."""
        return self.model._embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))

    def advance(self, layer: int, stream: Stream, tokens: Tokens) -> Stream:  # noqa: ARG002
        """The output of a block."""
        return self.links[layer](stream)

    def finish(
        self, layer: int, stream: Stream, tokens: Tokens, asked: Bool[Tensor, "rows length"]
    ) -> Float[Tensor, "asked vocab"]:
        """Run the blocks from one on."""
        for index in range(layer, len(self.links)):
            stream = self.advance(index, stream, tokens)
        return self.model._logits(stream[asked])


def _own_heads(link: AnyLayer) -> list[Heads]:
    found = []
    for layer in link.modules():
        last = getattr(layer, "out_proj", None)
        if isinstance(last, nn.Linear) and not getattr(layer, "is_feed_forward", False):
            count = int(getattr(layer, "n_heads", 1))
            own = layer if isinstance(layer, SoftmaxHeads) and layer.within(1) else None
            found.append(Heads(last, count, last.in_features // count, own))
    return found


_ATTENTION = ("self_attn", "self_attention", "attention", "attn")
_LAST = ("o_proj", "out_proj", "c_proj", "dense", "wo")
"""Names of attention and of its last map in models of transformers."""


def _their_heads(layer: nn.Module, count: int) -> list[Heads]:
    mixer = next((m for name in _ATTENTION if (m := getattr(layer, name, None))), layer)
    last: Any = next((m for name in _LAST if (m := getattr(mixer, name, None))), None)
    if last is None:
        return []
    width = last.in_features if isinstance(last, nn.Linear) else len(last.weight)
    return [Heads(last, count, width // count)]


class HuggingFaceNetwork(Network):
    """A model of the package transformers.

    Layers that must not run hand on the stream during a call of the model, so that masks and
    positions are the model's own.

    Raises:
        InputError: If no layers with attention heads are found.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
        found = next((m for m in lists if len(m) == config.num_hidden_layers), ())
        self.model, self.layers, self.device = model, list(found), model.device
        count = getattr(config, "num_attention_heads", 1)
        self.mixers = [_their_heads(layer, count) for layer in self.layers]
        if not any(self.mixers):
            raise InputError(
                f"no attention heads were found in a {type(model).__name__} of transformers: "
                "give the folder without hf:"
            )

    def enter(self, tokens: Tokens) -> Stream:
        """The input of the first layer."""
        return self._run(range(0), None, tokens, slice(1))[0]

    def advance(self, layer: int, stream: Stream, tokens: Tokens) -> Stream:
        """The output of a layer."""
        return self._run(range(layer, layer + 1), stream, tokens, slice(1))[0]

    def finish(
        self, layer: int, stream: Stream, tokens: Tokens, asked: Bool[Tensor, "rows length"]
    ) -> Float[Tensor, "asked vocab"]:
        """Run the layers from one on."""
        return self._run(range(layer, len(self.layers)), stream, tokens, asked)[1]

    def _run(
        self, layers: range, stream: Stream | None, tokens: Tokens, outputs: slice | Tensor
    ) -> tuple[Stream, Tensor]:
        """The stream after some layers, and logits at some positions after all.

        Args:
            layers: The layers that run.
            stream: The input of the first of them; by default the embedded tokens.
            tokens: The tokens.
            outputs: The positions, or the rows.
        """
        after = stream
        head = self.model.get_output_embeddings()

        def around(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(h: Tensor, *args: Any, **options: Any) -> Any:
                nonlocal after
                after = h if after is None else after
                found = forward(after, *args, **options) if index in layers else after
                after = found[0] if isinstance(found, tuple) else found
                return found

            return run

        with ExitStack() as undo:
            some = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][outputs][None],))
            undo.callback(some.remove)
            for index, layer in enumerate(self.layers):
                layer.forward = around(index, layer.forward)
                undo.callback(delattr, layer, "forward")
            logits = self.model(tokens, use_cache=False).logits[0]
        assert after is not None
        return after, logits
