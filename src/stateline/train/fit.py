"""Whether a task can train a model, and carry its state from batch to batch."""

from stateline.errors import InputError
from stateline.layers.base import LOW_PRECISION, require_causal
from stateline.models.factory import AnyModel
from stateline.models.language_model import LanguageModel
from stateline.tasks.base import Task
from stateline.train.config import TrainConfig


def check_fit(model: AnyModel, task: Task, config: TrainConfig) -> None:
    """Raise InputError unless a task can train a model as the configuration says."""
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    for name, parameter in trained:
        if parameter.dtype in LOW_PRECISION:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise InputError(
                f"training changes float32 weights, got {name} in {kind}, which would lose most "
                "updates by rounding: convert the model with model.float(), and compute in "
                'bfloat16 with TrainConfig(precision="bfloat16")'
            )
    if task.forecasts or isinstance(model, LanguageModel):
        require_causal(model, "the prediction of what follows")
    if config.loss_chunk is not None and not isinstance(model, LanguageModel):
        kind = model.config.kind.replace("_", " ")
        raise InputError(f"loss_chunk is for language models, got a {kind}: leave it out")
    if config.segment_len is not None or config.carry_state:
        require_causal(model, "training by segments")
    if config.carry_state:
        _check_carried_state(model, task, config)


def check_schedule(config: TrainConfig) -> None:
    """Raise InputError if a new run would have nothing but a warm-up before its schedule ends."""
    end, warmup = config.schedule_steps, min(config.warmup_steps, config.steps // 2)
    if end is not None and end <= warmup and not config.warmup_overlaps:
        raise InputError(
            f"schedule_steps must be above the {warmup} updates of the warm-up, got {end}: "
            "raise it, or lower warmup_steps"
        )


def _check_carried_state(model: AnyModel, task: Task, config: TrainConfig) -> None:
    if not task.carries_state:
        raise InputError(
            "carry_state needs a task whose batches continue each other: take text, tokens, "
            "algorithm or random_walk"
        )
    length, limit = task.train_length, model.max_len
    if limit is not None and (config.carry_cap is None or config.carry_cap > limit):
        raise InputError(
            f"the model was made for max_len={limit} tokens: set carry_cap to at most "
            f"that, got {config.carry_cap}"
        )
    if config.carry_cap is None and model.state_grows:
        raise InputError(
            "the state of this model grows with the length: limit what is carried with carry_cap, "
            "or use layers whose state is bounded"
        )
    if config.carry_cap is not None and config.carry_cap < length:
        raise InputError(
            f"carry_cap must be at least the task's length of {length}, got {config.carry_cap}"
        )
