"""How fast a model reads a prompt, decodes and trains: the calls that are timed.

A CPU is timed on one thread: as soon as another program runs, several threads mostly wait for each
other.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.bench.timing import Call
from stateline.generate.graphs import Graphs
from stateline.generate.session_state import PREFILL_CHUNK
from stateline.layers import AnyLayer
from stateline.layers.decoder import Decoder
from stateline.layers.state import select_rows
from stateline.models.factory import AnyModel, meta_model
from stateline.models.language_model import LanguageModel
from stateline.models.likelihood import token_losses
from stateline.models.size import training_bytes
from stateline.train.config import TrainConfig
from stateline.train.optimizer import make_optimizer

Phase = Literal["prefill", "decode", "train"]

TOKENS_PER_BATCH = 4096
"""Tokens of a training step of any sequence length, if the number of rows is not given."""

DECODE_STEPS = 32
"""Tokens decoded between two readings of the clock, each time from a copy of the same state."""

_SAMPLE = 256
"""Length at which the memory of activations per token is counted."""


class Cell(NamedTuple):
    """What is timed; decoding begins after a prompt of this length."""

    phase: Phase
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of one call."""
        return self.batch * (DECODE_STEPS if self.phase == "decode" else self.length)


def train_batch(length: int) -> int:
    """Rows of a training step: as many as make 4,096 tokens, at least one."""
    return max(1, TOKENS_PER_BATCH // length)


class Subject:
    """A model whose speed is measured; training steps change its weights.

    Training multiplies matrices in ``precision``.
    """

    def __init__(
        self, model: AnyModel, precision: Literal["float32", "bfloat16"] = "float32"
    ) -> None:
        self.model, self.precision = model, precision
        self.counted: AnyModel = meta_model(model.config)
        self.optimizer: torch.optim.Optimizer | None = None
        self._prompt: tuple[int, Any] | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def call(self, cell: Cell) -> Call:
        """The function to time; for decoding, the prompt is read now."""
        kinds = {"prefill": self._prefill, "decode": self._decode, "train": self._train}
        return kinds[cell.phase](cell.length, cell.batch)

    def flops(self, cell: Cell) -> float:
        """Forward FLOPs of a call, for comparison with other calls of the phase.

        A token that is decoded after n others costs as much as a token does on average in a
        sequence of 2 n.
        """
        length = 2 * cell.length if cell.phase == "decode" else cell.length
        return self.counted.flops_per_token(length) * cell.tokens

    def bytes(self, cell: Cell) -> float:
        """Memory that a cell takes beyond the model and its optimizer, estimated."""
        causal = self.counted.causal  # others have no state
        state = self.counted.state_bytes(cell.length) * cell.batch if causal else 0.0
        if cell.phase == "decode":  # a graph has a state, and is compared with a copy
            return (4.0 if next(self.model.parameters()).is_cuda else 2.0) * state
        precision = self.precision if cell.phase == "train" else "float32"
        sample = training_bytes(self.counted, 1, min(_SAMPLE, cell.length), precision=precision)
        per_token = sample["activations"] / min(_SAMPLE, cell.length)
        if cell.phase == "train":
            per_token += sample["logits"] / min(_SAMPLE, cell.length)
            return per_token * cell.length * cell.batch
        return state + per_token * min(PREFILL_CHUNK, cell.length) * cell.batch

    def limit(self, cell: Cell) -> str:
        """Why a model cannot run a cell on any machine; empty if it can."""
        most, needed = self.model.max_len, cell.length
        needed += DECODE_STEPS if cell.phase == "decode" else 0
        return f"max_len is {most:,}" if most is not None and needed > most else ""

    def _train(self, length: int, batch: int) -> Call:
        """A step: forward, backward, update."""
        model = self.model
        inputs = model.example_input(batch, length)
        targets = torch.randint(model.config.n_outputs, (batch, length), device=inputs.device)
        if self.optimizer is None:
            self.optimizer = make_optimizer(model, TrainConfig())
        optimizer = self.optimizer
        lower: AbstractContextManager[object] = nullcontext()
        if self.precision == "bfloat16":
            lower = torch.autocast(inputs.device.type, torch.bfloat16)
        self._prompt = None  # the weights are about to change

        def step() -> None:
            model.train()
            optimizer.zero_grad()
            with lower:
                logits = model(inputs)
            loss = token_losses(logits, targets).mean()
            del logits  # as in training, where the backward pass needs that memory
            loss.backward()
            optimizer.step()

        return step

    def _prefill(self, length: int, batch: int) -> Call:
        """Reading a prompt from an empty state, without the logits inside it."""
        tokens = self.model.example_input(batch, length)

        @torch.inference_mode()
        def prefill() -> None:
            read(self.model, tokens, self.model.eval().init_state(batch))

        return prefill

    def _decode(self, context: int, batch: int) -> Call:
        """Decoding one token after the other, from a copy of the state after the context.

        On a GPU by recorded graphs, as a session decodes.
        """
        model, decoder = self.model.eval(), Decoder(self.model)
        with torch.inference_mode():
            token = model.example_input(batch, 1)[:, 0]
            state = select_rows(self._state(context), [0] * batch)
        graphs = Graphs(lambda *now: decoder.ready.step_(*now)) if token.is_cuda else None

        @torch.inference_mode()
        def decode() -> None:
            donated = pytree.tree_map(torch.clone, state)
            if decoder.is_stale():  # trained in between
                model.eval()
                decoder.refresh()
                if graphs is not None:
                    graphs.clear()
            for _ in range(DECODE_STEPS):
                if graphs is None:
                    decoder.ready.step_(token, donated)
                else:
                    _, donated = graphs(token, donated)

        return decode

    def _state(self, length: int) -> Any:
        """The state of one row after ``length`` tokens; continues from a shorter prompt's state."""
        before = self._prompt
        if before is None or before[0] > length:
            before = (0, self.model.eval().init_state(1, capacity=DECODE_STEPS))
        position, state = before
        state = read(self.model, self.model.example_input(1, length - position), state)
        self._prompt = (length, state)
        return state


def read(model: AnyLayer, tokens: Tensor, state: Any) -> Any:
    """The state of a model or a layer after a prompt; a language model omits the logits inside."""
    options: dict[str, Any] = {"keep": 1} if isinstance(model, LanguageModel) else {}
    for chunk in tokens.split(PREFILL_CHUNK, dim=1):
        _, state = model.forward_chunk(chunk, state, **options)
    return state
