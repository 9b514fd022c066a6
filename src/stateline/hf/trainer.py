"""Our parameter groups in the optimizers of transformers' Trainer."""

from typing import Any

from torch import nn

from stateline.train.config import TrainConfig
from stateline.train.optimizer import parameter_groups


class OptimizerGroups:
    """Mixin for Trainer and its subclasses: weight decay and learning rates as in our own loop.

    Trainer's own rule asks for the names of parameters alone: it decays step sizes, transitions
    and other vectors of state space layers, at the rate of matrices. With this class it gives its
    optimizer, whichever ``TrainingArguments`` names, the groups of
    :func:`stateline.train.parameter_groups`.

    Example:
        >>> from transformers import Trainer
        >>> class GroupedTrainer(OptimizerGroups, Trainer): ...
    """

    def create_optimizer(self: Any, model: nn.Module | None = None) -> Any:
        """The optimizer of the training arguments over our groups."""
        if self.optimizer is None:
            model = self.model if model is None else model
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, model)
            rates = TrainConfig(lr=self.args.learning_rate, weight_decay=self.args.weight_decay)
            groups = parameter_groups(model, rates)
            for group in groups:
                group["params"] = [p for p in group["params"] if p.requires_grad]
            self.optimizer = kind([group for group in groups if group["params"]], **settings)
        return self.optimizer
