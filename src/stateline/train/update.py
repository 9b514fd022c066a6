"""One update: forward and backward passes, the norm of the gradient, the optimizer's step."""

import hashlib
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stateline.devices import log_bfloat16_rate
from stateline.layers.state import detach, trim
from stateline.models.factory import AnyModel
from stateline.ops.containment import all_or_nothing
from stateline.tasks.base import Task
from stateline.train.batches import MicroBatch, positions_after
from stateline.train.chunked_loss import chunked
from stateline.train.config import TrainConfig
from stateline.train.distillation import Distillation
from stateline.train.metrics import NotFinite
from stateline.train.optimizer import make_optimizer, move_averages
from stateline.train.processes import Processes
from stateline.train.segment import Segment
from stateline.train.teacher import Teacher


class Updater:
    """The model, its optimizer and the carried state.

    The host reads the loss and the norm of the gradient once per update, before the optimizer's
    step, so that no update is made from numbers that are not finite.

    Args:
        model: The model; its weights are changed.
        task: Its loss is minimised.
        config: Optimizer, precision, state.
        processes: The processes that share the rows.
        teacher: The model to learn from, in place of the task's loss.

    Attributes:
        optimizer: The optimizer.
        state: The state that is carried to the next micro-batch, or ``None``.
    """

    def __init__(
        self,
        model: AnyModel,
        task: Task,
        config: TrainConfig,
        processes: Processes,
        teacher: Teacher | None = None,
    ) -> None:
        self.model, self.task, self.config, self.processes = model, task, config, processes
        if config.precision == "bfloat16" and processes.device.type == "cpu":
            log_bfloat16_rate()
        loss = partial(chunked, task.loss, config.loss_chunk) if config.loss_chunk else None
        distillation = None if teacher is None else Distillation(teacher, config)
        segment = Segment(model, getattr(torch, config.precision), loss, distillation)
        self.gives_loss = loss is not None or distillation is not None
        if config.compile:
            segment.compile()
        self.segment = processes.wrap(segment, processes.shards(config), config.match == "mixing")
        self.optimizer = make_optimizer(model, config)
        self.parameters = list(model.parameters())
        self.mixtures: list[Any] = [
            module for module in model.modules() if getattr(module, "balances", False)
        ]
        every = {mixture: mixture.new_uses() for mixture in self.mixtures}
        self.uses = {mixture: uses for mixture, uses in every.items() if uses is not None}
        for mixture, uses in self.uses.items():
            mixture.uses = uses
        self.state: Any = None
        self._positions = torch.zeros(0, dtype=torch.int64)

    def carry(self, state: Any) -> None:
        """Start from a carried state of this process's rows."""
        self.state, self._positions = state, state.position.cpu()

    def forget(self) -> None:
        """Replace a carried state, whose numbers may not be finite, by the empty one."""
        if self.state is not None:
            self.carry(self.model.init_state(len(self._positions)))

    def __call__(self, micro_batches: list[MicroBatch], step: int) -> tuple[float, float]:
        """Make one update.

        Random numbers, such as the masks of dropout, follow from the seed of the training, the
        update's number, counted from 0, and the process.

        Returns:
            The mean loss before it, in nats per target, and the norm of the gradient before
            clipping.

        Raises:
            NotFinite: If the loss or the norm of the gradient is not finite; weights are as they
                were.
        """
        device = self.processes.device
        with (
            all_or_nothing(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            if device.type == "cpu":
                # torch.manual_seed would record a traceback for every kind of device
                torch.default_generator.manual_seed(self._seed(step))
            else:
                torch.manual_seed(self._seed(step))
            return self._update(micro_batches)

    def _seed(self, step: int) -> int:
        """Seed of the masks of dropout in an update of this process."""
        text = f"dropout {self.config.seed} {step} {self.processes.rank}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _update(self, micro_batches: list[MicroBatch]) -> tuple[float, float]:
        scored = sum(micro.scored for micro in micro_batches)
        scored_in_all = max(1.0, self.processes.sum(scored))
        self.optimizer.zero_grad()
        positions = sum(micro.tokens.shape[:2].numel() for micro in micro_batches)
        for mixture in self.mixtures:
            mixture.positions = positions
        for uses in self.uses.values():
            uses.grad = torch.zeros_like(uses)
        losses = [
            self._backward(micro, scored_in_all, last=micro is micro_batches[-1])
            for micro in micro_batches
        ]
        clip = self.config.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, clip)
        loss, size = self._read(losses, norm)
        for what, value in (("loss", loss), ("gradient", size)):
            if not math.isfinite(value):
                raise NotFinite(f"the {what} became {value}")
        self.optimizer.step()
        if self.config.ema is not None:
            move_averages(self.optimizer, self.config.ema)
        for mixture, uses in self.uses.items():
            assert uses.grad is not None
            mixture.correct(self.processes.sum_tensors([uses.grad]))
        return loss, size

    def _backward(self, micro: MicroBatch, scored_in_all: float, last: bool) -> Tensor:
        """Add the gradient of a micro-batch; return its part of the loss, on the device."""
        with self.processes.local(self.segment, last=last):
            lengths = None if self.model.causal else self.task.row_lengths(micro.targets)
            outputs, self.state = self.segment(
                micro.tokens, *self._enter(micro), lengths, micro.starts, micro.targets
            )
            loss = outputs if self.gives_loss else self.task.loss(outputs, micro.targets)
            del outputs  # the backward pass needs the memory of logits
            loss = loss / scored_in_all
            (loss * self.processes.count).backward()  # processes average their gradients
        self.state = None if self.state is None else detach(self.state)
        return loss.detach()

    def _enter(self, micro: MicroBatch) -> tuple[Any, Tensor | None]:
        """The state before a micro-batch, and which rows start from an empty state instead."""
        if micro.fresh is None:
            return None, None
        fresh, cap = micro.fresh, self.config.carry_cap
        if self.state is None:
            self._positions = torch.zeros(len(fresh), dtype=torch.int64)
        elif cap is not None:
            fresh = fresh | (self._positions + micro.tokens.shape[1] > cap)
        self._positions = positions_after(self._positions, micro._replace(fresh=fresh))
        return None if self.state is None else trim(self.state), fresh

    def _read(self, losses: list[Tensor], norm: Tensor) -> tuple[float, float]:
        """The loss over all processes and the norm of the gradient: one synchronisation."""
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        total = self.processes.sum_tensors(losses)
        loss, size = torch.stack([total, whole.to(total)]).tolist()
        return loss, size
