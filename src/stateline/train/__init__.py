"""Training: configuration, optimizer, updates, checkpoints, the loop."""

from typing import TYPE_CHECKING, Any

__all__ = ["train"]

if TYPE_CHECKING:
    from stateline.train.loop import train as train
else:

    def __getattr__(name: str) -> Any:
        """Import the loop at its first use: the command line reads settings without torch."""
        if name == "train":
            from stateline.train import loop

            return loop.train
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
