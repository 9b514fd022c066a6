"""Staircase, Cached Staircase, Ladder, Transformer-XL and Feedback against their official code.

The official quirks live here: zeros that are attended to before the first token, memories that are
projected anew in every segment (so that their projections get a gradient), a staircase that carries
what layers made in place of what they saw, a cached one that finishes all chunks in flight, and
Feedback's memories that are normalised once more at every segment.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.layers import AnyLayer, Branch, SlidingAttention
from stateline.layers.compose import Chain
from stateline.layers.context import Context
from stateline.layers.wrappers.cached_staircase import CachedStaircaseState
from stateline.layers.wrappers.feedback import FeedbackState
from stateline.layers.wrappers.staircase import StaircaseState
from stateline.models.convert import transformer_sequential
from stateline.models.convert.table import load_pretrained
from stateline.models.language_model import LanguageModel
from tests.parity.cases import Case, covers, here

TOLERANCE = 2e-5


@dataclass
class Official:
    """A model on its way through the segments of a case."""

    case: Case
    model: LanguageModel
    vectors: dict[str, Tensor]

    def __init__(self, case: Case) -> None:
        self.case, self.vectors = case, case.tensors()
        self.settings = {**case.about["args"], "kind": case.kind}
        self.model = load_pretrained(self.under("param."), settings=self.settings, device=here())
        self.calls: dict[AnyLayer, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for branch in self.model.modules():
            if isinstance(branch, Branch):
                self.record(branch)

    def under(self, prefix: str) -> dict[str, Tensor]:
        return {n.removeprefix(prefix): t for n, t in self.vectors.items() if n.startswith(prefix)}

    def record(self, branch: Branch) -> None:
        """Note what goes into a branch, and what comes out."""
        verb = branch.forward_chunk

        def run(x: Tensor, state: Any) -> tuple[Tensor, Any]:
            y, state = verb(x, state)
            self.calls[branch].append((x, y))
            return y, state

        branch.forward_chunk = run

    def segments(self) -> Iterator[dict[str, Tensor]]:
        number = 0
        while segment := self.under(f"seg{number}."):
            yield segment
            number += 1

    def zeros(self, slots: int) -> Tensor:
        return torch.zeros(len(self.vectors["seg0.x"]), slots, self.model.d_model)

    def run(self, carried: Any, states: Callable[[Any], Any], keep: Callable[..., Any]) -> None:
        """Every segment's outputs, loss, carried memory; then the gradients of all losses.

        Args:
            carried: Memory before the first segment.
            states: The state of our stack, made from the memory.
            keep: ``(carried, h, y) -> carried``, from the stack's input and output.
        """
        total = torch.zeros(())
        for segment in self.segments():
            self.calls.clear()
            x = self.model.embedding(segment["x"])
            y, _ = self.model.stack.forward_chunk(x, states(carried))
            log_p = self.model._logits(y).log_softmax(dim=-1)
            torch.testing.assert_close(log_p, segment["logp"], rtol=0, atol=TOLERANCE)
            loss = F.nll_loss(log_p.flatten(0, 1), segment["y"].flatten())
            torch.testing.assert_close(loss, segment["loss"], rtol=0, atol=TOLERANCE)
            carried = keep(carried, x, y)
            self.compare_memories(carried, segment)
            total = total + loss
        total.backward()
        self.compare_gradients()

    def compare_memories(self, carried: Any, segment: dict[str, Tensor]) -> None:
        """Carried memories in the order of their official names."""
        official = sorted(
            (tuple(int(n) for n in name.split(".")[1:]), name)
            for name in segment
            if name.startswith("cache.")
        )
        flat = [t for part in carried for t in (part if isinstance(part, list) else [part])]
        assert len(flat) == len(official)
        for found, (_, name) in zip(flat, official, strict=True):
            wanted = segment[name]
            if self.case.kind == "feedback":
                wanted = wanted.transpose(0, 1)
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)

    def compare_gradients(self) -> None:
        """Gradients of all parameters; of one that is shared there, the sum over our copies."""
        (converter,) = transformer_sequential.CONVERTERS.values()
        blank = {name: torch.zeros_like(t) for name, t in self.under("param.").items()}
        official = dict(converter.read({**blank, **self.under("grad.")}, self.settings))
        found: dict[str, Any] = defaultdict(float)
        wanted: dict[str, Any] = defaultdict(float)
        for name, parameter in self.model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            group = self.group(name)
            found[group], wanted[group] = found[group] + grad, wanted[group] + official[name]
        for group, grad in wanted.items():
            torch.testing.assert_close(found[group], grad, rtol=0, atol=TOLERANCE, msg=group)

    def group(self, name: str) -> str:
        """Parameters that the official code has once."""
        if name.endswith("position_keys"):
            return "position_keys"
        branch = self.model.get_submodule(name.split(".norm.")[0]) if ".norm." in name else None
        shared = self.case.about["args"].get("share_proj_kv") and branch
        if shared and isinstance(branch.layer, SlidingAttention):
            return f"norm1.{name.rsplit('.', 1)[1]}"
        return name


def attentions(layer: AnyLayer) -> list[Branch]:
    """Branches with attention, in the order in which they run."""
    if isinstance(layer, Chain):
        return [branch for link in layer.links for branch in attentions(link)]
    attends = isinstance(layer, Branch) and isinstance(layer.layer, SlidingAttention)
    return [layer] if attends else []


def state_from(layer: AnyLayer, memories: Iterator[Tensor]) -> Any:
    """State of a core whose attentions have seen the memories, one after the other."""
    if isinstance(layer, Chain):
        return tuple(state_from(link, memories) for link in layer.links)
    if not attentions(layer):
        return layer.init_state(1)
    memory = next(memories)
    unrecorded = type(layer).forward_chunk
    return unrecorded(layer, memory, layer.init_state(len(memory)))[1]


@covers("transformer_xl", "ladder")
def test_layers_with_a_memory_each(case: Case) -> None:
    official = Official(case)
    stack, span = official.model.stack, case.about["args"]["attn_lim"]
    order = attentions(stack)

    def keep(carried: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        calls = {branch: iter(made) for branch, made in official.calls.items()}
        seen = [next(calls[branch])[0] for branch in order]
        pairs = zip(carried, seen, strict=True)
        return [torch.cat([memory, new], dim=1)[:, -span:].detach() for memory, new in pairs]

    zeros = [official.zeros(span)] * len(order)
    official.run(zeros, lambda carried: state_from(stack, iter(carried)), keep)


@covers("staircase")
def test_staircase(case: Case) -> None:
    official = Official(case)
    (staircase,) = official.model.stack.links
    core, passes, chunk_len = staircase.core, staircase.passes, staircase.chunk_len
    links = core.links
    layers = [links[2 * n + 1] for n in range(len(links) // 2)]  # whose output is a layer's

    def states(carried: list[list[Tensor]]) -> tuple[StaircaseState]:
        batch = len(official.vectors["seg0.x"])
        before = [state_from(core, iter(memories)) for memories in carried]
        phase = torch.zeros(batch, dtype=torch.int64)
        return (StaircaseState(phase, phase, (*before, core.init_state(batch))),)

    def keep(carried: list[list[Tensor]], x: Tensor, y: Tensor) -> list[list[Tensor]]:
        drain = x.shape[1] // chunk_len
        return [
            [official.calls[layer][drain + k][1].detach() for layer in layers]
            for k in range(passes - 1)
        ]

    zeros = [
        [official.zeros((passes - 1 - k) * chunk_len) for _ in layers] for k in range(passes - 1)
    ]
    official.run(zeros, states, keep)


@covers("cached_staircase")
def test_cached_staircase(case: Case) -> None:
    official = Official(case)
    (staircase,) = official.model.stack.links
    in_flight = (staircase.passes - 1) * staircase.chunk_len
    most = None if staircase.steps is None else staircase.steps * staircase.chunk_len
    kept = None if most is None else most - staircase.passes * staircase.chunk_len

    def states(carried: list[Tensor]) -> tuple[CachedStaircaseState]:
        """A chunk that was in flight is seen by its final vectors instead."""
        (final,) = carried
        positions = torch.arange(final.shape[1]).expand(final.shape[:2])
        links = [link for link in staircase._links if link.attends]
        cache = tuple(link.project(final, positions) for link in links)
        live = tuple(
            tuple(its.with_slots(in_flight + staircase.chunk_len) for its in cache)
            for _ in range(staircase.passes)
        )
        length = torch.full((len(final),), final.shape[1])
        return (CachedStaircaseState(length, cache, live),)

    def keep(carried: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        both = torch.cat([carried[0], y.detach()], dim=1)
        return [both if kept is None else both[:, max(0, both.shape[1] - kept) :]]

    visible = kept if case.about["args"]["pad_zero"] else 0
    official.run([official.zeros(visible or 0)], states, keep)


@covers("feedback")
def test_feedback(case: Case) -> None:
    official = Official(case)
    (feedback,) = official.model.stack.links
    first = feedback._projecting[0].link
    made: list[Tensor] = []
    project = feedback.project

    def recorded(memory: Tensor, positions: Tensor) -> tuple[Context, ...]:
        made.extend([memory] if memory.shape[1] else [])
        return project(memory, positions)

    feedback.project = recorded

    def states(carried: list[Tensor]) -> tuple[FeedbackState]:
        (memory,) = carried
        length = torch.full((len(memory),), memory.shape[1])
        positions = torch.arange(memory.shape[1]).expand(memory.shape[:2])
        return (FeedbackState(length, project(memory, positions)),)

    def keep(carried: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        both = torch.cat([carried[0], *(first.enter(memory)[0] for memory in made)], dim=1)
        made.clear()
        return [both[:, -feedback.window :].detach()]

    official.run([official.zeros(feedback.window)], states, keep)
