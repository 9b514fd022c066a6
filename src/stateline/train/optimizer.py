"""The optimizer over the parameter groups that layers declare, and the learning-rate schedule."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stateline.errors import InputError
from stateline.layers.linear import Linear
from stateline.train.config import TrainConfig

MATRICES = "matrices"
"""Name of the group of parameters that Muon updates."""

AVERAGE = "average"
"""Name of the running mean of a parameter among its moments."""


def named(model: nn.Module, setting: str, pattern: str) -> list[nn.Parameter]:
    """The weights whose names fit a pattern of a setting.

    Raises:
        InputError: If there are none.
    """
    names = dict(model.named_parameters())
    found = [weight for name, weight in names.items() if fnmatchcase(name, pattern)]
    if not found:
        some = ", ".join([*names][:3])
        raise InputError(f"{setting}={pattern!r:.60} fits no weight: names are such as {some}")
    return found


def parameter_groups(model: nn.Module, config: TrainConfig) -> "Groups":
    """Parameters by optimizer group.

    A layer's ``optimizer_groups`` assigns its own parameters to ``ssm`` (own learning rate, no
    weight decay) or ``no_decay``. All other matrices are decayed; vectors (norms, biases) are not,
    unless ``decay_vectors`` says so; with ``decay_all``, every group is decayed. For Muon, the
    weights of the linear maps between the embedding and the head, including the weights of each
    expert, are the group ``matrices``.

    Args:
        model: Any module.
        config: Learning rates and weight decay.

    Returns:
        The groups that have parameters, for a PyTorch optimizer, each with its name, its weight
        decay and its highest learning rate, as ``lr`` and as ``peak``, which schedules leave.

    Raises:
        InputError: If ``rates`` names no weight.
    """
    members: dict[str, list[nn.Parameter]] = {"decay": [], MATRICES: [], "no_decay": [], "ssm": []}
    matrices = _hidden_matrices(model) if OPTIMIZERS[config.optimizer].matrices else set()
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        declared = getattr(module, "optimizer_groups", {})
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                decayed = parameter.ndim > 1 or config.decay_vectors
                default = "decay" if decayed else "no_decay"
                default = MATRICES if parameter in matrices else default
                members[declared.get(name, default)].append(parameter)
    peaks = {"ssm": config.ssm_lr, MATRICES: config.muon_lr}
    if config.ssm_lr is None:
        peaks["ssm"] = min(1e-3, config.lr)
    maps = _maps(model, heads=config.muon_heads)
    decayed_groups = members if config.decay_all else ("decay", MATRICES)
    given = {
        parameter: rate
        for pattern, rate in reversed(config.named_rates)
        for parameter in named(model, "rates", pattern)
    }
    groups: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameters in members.items():
        for parameter in parameters:
            rate = given.get(parameter, peaks.get(name) or config.lr)
            groups.setdefault((name, rate), []).append(parameter)
    return [
        {
            "name": name,
            "params": parameters,
            "lr": rate,
            "peak": rate,
            "weight_decay": config.weight_decay if name in decayed_groups else 0.0,
            **({"maps": [maps.get(p, ()) for p in parameters]} if name == MATRICES else {}),
        }
        for (name, rate), parameters in groups.items()
    ]


def _hidden_matrices(model: nn.Module) -> set[Tensor]:
    """Weights of the linear maps in a model's stack, including those that layers own.

    The model may stand inside others, such as those of DDP, PEFT or transformers.
    """
    stacks = [getattr(module, "stack", None) for module in model.modules()]
    modules = [m for stack in stacks if isinstance(stack, nn.Module) for m in stack.modules()]
    return {module.weight for module in modules if isinstance(module, nn.Linear)} | {
        getattr(module, name) for module in modules for name in getattr(module, "maps", ())
    }


class Maps(NamedTuple):
    """Linear maps in some rows of a matrix: each head of the first, of the second, and so on."""

    rows: int
    heads: int
    turns: int

    def apart(self, x: Tensor) -> list[Tensor]:
        """The maps, each (its rows, ...)."""
        return list(x.unflatten(0, (self.heads, self.turns, -1)).transpose(0, 1).flatten(1, 2))

    def joined(self, maps: list[Tensor]) -> Tensor:
        """The rows of all maps."""
        return torch.stack(maps).unflatten(1, (self.heads, -1)).transpose(0, 1).flatten(0, 2)


def _maps(model: nn.Module, *, heads: bool) -> dict[Tensor, tuple[Maps, ...]]:
    """The linear maps that are one matrix; with ``heads``, each head is a map."""
    return {
        module.weight: tuple(
            Maps(rows, 1, n * turns) if heads else Maps(rows, n if turns > 1 else 1, turns)
            for rows, n, turns in zip(
                module.parts, module.part_heads, module.part_turns, strict=True
            )
            if rows
        )
        for module in model.modules()
        if isinstance(module, Linear)
    }


Groups = list[dict[str, Any]]
Moments = dict[str, Tensor]


class Maker(NamedTuple):
    """An optimizer.

    Attributes:
        make: Makes it for parameter groups.
        moments: For a group's parameter, tensors of the shapes and dtypes of its moments, by name.
        matrices: Whether hidden matrices are a group of their own.
    """

    make: Callable[[Groups, TrainConfig], torch.optim.Optimizer]
    moments: Callable[[str, Tensor], Moments]
    matrices: bool = False


def _adamw(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, with one kernel for a whole step on devices for which PyTorch has one."""
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=fused or None)


def _adamw_moments(_: str, parameter: Tensor) -> Moments:
    return {"step": _count(), "exp_avg": parameter, "exp_avg_sq": parameter}


def _adafactor(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    return Adafactor(groups, config.lr)


def _adafactor_moments(_: str, parameter: Tensor) -> Moments:
    if parameter.ndim < 2:
        return {"step": _count(), "variance": parameter}
    rows, columns = parameter[..., :1], parameter[..., :1, :]
    return {"step": _count(), "row_var": rows, "col_var": columns}


class Adafactor(torch.optim.Adafactor):
    r"""PyTorch's Adafactor at the whole learning rate, and with momentum if asked for.

    PyTorch's takes the smaller of the learning rate and :math:`1/\sqrt{t}` in step t, which no
    schedule can raise. With the change :math:`\Delta_t` of a parameter that it makes at the whole
    rate, and momentum,

    .. math:: m_t = \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t, \qquad p_t = p_{t-1} + m_t

    Weight decay comes before, and is not averaged.

    Args:
        groups: Parameter groups.
        lr: Learning rate.
        beta1: Decay rate of the mean of the changes; ``None`` for no momentum.

    References:
        Shazeer and Stern, "Adafactor", ICML 2018, section 7; the mean begins at zero and is not
        corrected, as in T5X, whose rate has no such limit either.
    """

    def __init__(self, groups: Groups, lr: float, beta1: float | None = None) -> None:
        super().__init__(groups, lr=lr)
        self.beta1 = beta1
        for group in self.param_groups:  # PyTorch's step decays nothing
            group["decay"], group["weight_decay"] = group["weight_decay"], 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make a step."""
        rates = {p: g["lr"] for g in self.param_groups for p in g["params"] if p.grad is not None}
        for group in self.param_groups:
            for p in group["params"]:
                if p in rates and group["decay"]:
                    p.mul_(1 - group["lr"] * group["decay"])
        before = {p: p.clone() for p in rates}
        loss = super().step(closure)
        for p, old in before.items():
            change = (p - old) * max(1.0, rates[p] * self.state[p]["step"].item() ** 0.5)
            if self.beta1 is not None:
                mean = self.state[p].setdefault("momentum", torch.zeros_like(p))
                change = mean.lerp_(change, 1 - self.beta1)
            p.copy_(old + change)
        return loss


def _adafactor_momentum(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    return Adafactor(groups, config.lr, config.beta1)


def _adafactor_momentum_moments(group: str, parameter: Tensor) -> Moments:
    return {**_adafactor_moments(group, parameter), "momentum": parameter}


def _muon_moments(group: str, parameter: Tensor) -> Moments:
    if group == MATRICES:
        return {"momentum_buffer": parameter}
    return _adamw_moments(group, parameter)


def _count() -> Tensor:
    return torch.zeros((), device="meta")


class Muon(torch.optim.Optimizer):
    """PyTorch's Muon, also for stacks of matrices (experts) and for matrices that FSDP shards.

    Maps that are one matrix (``maps`` of a group, for each parameter) are changed one by one, so
    that models are compared alike, however they store their maps.

    The Newton-Schulz iteration needs whole matrices: every process computes it for all of them, as
    with DDP, and changes its own part. Updates have the size of AdamW's at the same learning rate
    (``match_rms_adamw``).

    Args:
        params: Matrices, or tensors whose last two axes are those of matrices.
        lr: Learning rate.
        weight_decay: Weight decay.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})
        self._plain = torch.optim.Muon(
            [torch.zeros(1, 1)],
            momentum=0,
            nesterov=False,
            weight_decay=0,
            adjust_lr_fn="match_rms_adamw",
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        """Make a step."""
        for group in self.param_groups:
            of_all = group.get("maps") or [()] * len(group["params"])
            for p, maps in zip(group["params"], of_all, strict=True):
                if p.grad is not None:
                    self._step(p, p.grad, group, maps)

    def _step(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], maps: tuple[Maps, ...]
    ) -> None:
        if not (state := self.state[p]):
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"])
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        whole = whole.contiguous()
        pieces = zip(maps, whole.split([part.rows for part in maps]), strict=True) if maps else ()
        parts = [part.apart(piece) for part, piece in pieces] or [[*whole.view(-1, *p.shape[-2:])]]
        changes = [[torch.zeros_like(matrix) for matrix in part] for part in parts]
        matrices = [*chain.from_iterable(changes)]
        for matrix, own in zip(matrices, chain.from_iterable(parts), strict=True):
            matrix.grad = own
        self._plain.param_groups[0] |= {"params": matrices, "lr": group["lr"]}
        self._plain.step()
        self._plain.state.clear()
        joined = [part.joined(own) for part, own in zip(maps, changes, strict=False)]
        change = torch.cat(joined) if joined else torch.stack(matrices).view_as(whole)
        if isinstance(p, DTensor):
            change = distribute_tensor(change, p.device_mesh, p.placements, src_data_rank=None)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(change)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for all other parameters."""

    def __init__(self, groups: Groups, config: TrainConfig) -> None:
        super().__init__(groups, {"lr": config.lr})
        matrices = [group for group in self.param_groups if group["name"] == MATRICES]
        others = [group for group in self.param_groups if group["name"] != MATRICES]
        self._parts: list[torch.optim.Optimizer] = [_adamw(others, config)] if others else []
        if matrices:
            self._parts.append(Muon(matrices, lr=config.lr))
        for part in self._parts:  # they share the groups, too
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Make a step of both."""
        losses = [part.step(closure) for part in self._parts]
        return losses[0]


OPTIMIZERS = {
    "adamw": Maker(_adamw, _adamw_moments),
    "adafactor": Maker(_adafactor, _adafactor_moments),
    "adafactor_momentum": Maker(_adafactor_momentum, _adafactor_momentum_moments),
    "muon": Maker(MuonWithAdamW, _muon_moments, matrices=True),
}
"""The values of ``TrainConfig.optimizer``."""


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer over the groups of a model."""
    return OPTIMIZERS[config.optimizer].make(parameter_groups(model, config), config)


def _like(config: TrainConfig, group: str, parameter: Tensor) -> Moments:
    """Tensors like what is kept of a group's parameter, by kind."""
    average = {} if config.ema is None else {AVERAGE: parameter}
    return OPTIMIZERS[config.optimizer].moments(group, parameter) | average


def moments_like(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig
) -> dict[str, Moments]:
    """Tensors like an optimizer's moments, by the name of the parameter and then by kind."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: _like(config, group["name"], parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def moment_bytes(model: nn.Module, config: TrainConfig) -> int:
    """Bytes of the optimizer's moments."""
    return sum(
        moment.nbytes
        for group in parameter_groups(model, config)
        for parameter in group["params"]
        for moment in _like(config, group["name"], parameter).values()
    )


@torch.no_grad()
def move_averages(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Move the average of each weight, kept beside its moments; the first is the weight itself."""
    for parameter, moments in optimizer.state.items():
        if AVERAGE in moments:
            moments[AVERAGE].lerp_(parameter, 1 - decay)
        else:
            moments[AVERAGE] = parameter.clone()


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Exchange the weights and their averages, where there are any, inside the block."""
    exchange(optimizer)
    try:
        yield
    finally:
        exchange(optimizer)


@torch.no_grad()
def exchange(optimizer: torch.optim.Optimizer) -> None:
    """Exchange the weights and their averages, where there are any."""
    for parameter, moments in optimizer.state.items():
        if AVERAGE in moments:
            weights = parameter.clone()
            parameter.copy_(moments[AVERAGE])
            moments[AVERAGE].copy_(weights)


def set_moments(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, moments: Moments
) -> None:
    """Restore an optimizer's moments of a parameter, each tensor on the device that it needs."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    optimizer.state[parameter] = {
        kind: moment.to(parameter.device) if kind != "step" or group.get("fused") else moment
        for kind, moment in moments.items()
    }


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> float:
    """Set the learning rates of update number ``step``; return their ratio to the highest."""
    share = learning_rate_share(config, step)
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
    return share


def learning_rate_share(config: TrainConfig, step: int) -> float:
    """Ratio of the learning rate of update number ``step`` (from 0) to the highest.

    The equations are those of :class:`~stateline.train.config.TrainConfig`.

    References:
        ``wsd``: Hu et al., "MiniCPM", COLM 2024, section 4; with a linear decay: Hägele et al.,
        "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", NeurIPS 2024.

    Example:
        >>> linear = TrainConfig(steps=100, warmup_steps=10, schedule="linear")
        >>> [round(learning_rate_share(linear, step), 3) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.5, 0.011]
    """
    warmup = min(config.warmup_steps, config.steps // 2)
    if step < warmup:
        return (step + (not config.warmup_from_zero)) / warmup
    begin, end = 0 if config.warmup_overlaps else warmup, config.schedule_steps or config.steps
    if config.schedule == "constant":
        return 1.0
    length, final = end - begin, config.final_share
    if config.schedule == "wsd":
        length = min(length, config.decay_steps or max(2, end // 10))
    left = min(1.0, max(0, end - step) / max(1, length))
    if config.schedule == "cosine":
        final = 0.1 if final is None else final
        left = (1 - math.cos(math.pi * left)) / 2
    final = final or 0.0
    return final + (1 - final) * left
