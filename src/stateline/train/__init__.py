"""Training: configuration, optimizer, updates, checkpoints, the loop."""

from typing import TYPE_CHECKING, Any

__all__ = ["make_optimizer", "parameter_groups", "train"]

if TYPE_CHECKING:
    from stateline.train.loop import train as train
    from stateline.train.optimizer import make_optimizer as make_optimizer
    from stateline.train.optimizer import parameter_groups as parameter_groups
else:

    def __getattr__(name: str) -> Any:
        """Import the loop at its first use: the command line reads settings without torch."""
        if name == "train":
            from stateline.train import loop

            return loop.train
        if name in __all__:
            from stateline.train import optimizer

            return getattr(optimizer, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
