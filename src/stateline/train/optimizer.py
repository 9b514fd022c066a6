"""The optimizer over the parameter groups that layers declare, and the learning-rate schedule."""

import math
from typing import Any

import torch
from torch import nn

from stateline.train.config import TrainConfig


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Parameters by optimizer group.

    A layer's ``optimizer_groups`` assigns its own parameters to ``ssm`` (own learning rate, no
    weight decay) or ``no_decay``. All other matrices are decayed; vectors (norms, biases) are not,
    unless ``decay_vectors`` says so.

    Args:
        model: Any module.
        config: Learning rates and weight decay.

    Returns:
        The groups that have parameters, for a PyTorch optimizer, each with its name and its
        highest learning rate under ``peak``.
    """
    members: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "ssm": []}
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        declared = getattr(module, "optimizer_groups", {})
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                decayed = parameter.ndim > 1 or config.decay_vectors
                default = "decay" if decayed else "no_decay"
                members[declared.get(name, default)].append(parameter)
    ssm_rate = config.ssm_lr
    if ssm_rate is None:
        ssm_rate = min(1e-3, config.lr)
    return [
        {
            "name": name,
            "params": parameters,
            "peak": ssm_rate if name == "ssm" else config.lr,
            "weight_decay": config.weight_decay if name == "decay" else 0.0,
        }
        for name, parameters in members.items()
        if parameters
    ]


_FUSED = ("cpu", "cuda")
"""Devices on which PyTorch has one kernel for a whole step of AdamW."""


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer over the groups of a model; AdamW is fused if its device allows it."""
    groups = parameter_groups(model, config)
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.lr)
    fused = all(parameter.device.type in _FUSED for parameter in model.parameters())
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused or None
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> float:
    """Set the learning rates of update number ``step``; return their ratio to the highest."""
    share = learning_rate_share(config, step)
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
    return share


def learning_rate_share(config: TrainConfig, step: int) -> float:
    """Ratio of the learning rate of update number ``step`` (from 0) to the highest.

    Example:
        >>> linear = TrainConfig(steps=100, warmup_steps=10, schedule="linear")
        >>> [round(learning_rate_share(linear, step), 3) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.5, 0.011]
    """
    warmup = min(config.warmup_steps, config.steps // 2)
    if step < warmup:
        return (step + (not config.warmup_from_zero)) / warmup
    begin, end = 0 if config.warmup_overlaps else warmup, config.schedule_steps or config.steps
    left = max(0, end - step) / max(1, end - begin)
    if config.schedule == "linear":
        return left
    if config.schedule == "cosine":
        return 0.1 + 0.9 * 0.5 * (1 - math.cos(math.pi * left))
    return 1.0
