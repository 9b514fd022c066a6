"""How a model is trained, as plain data."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from stateline.errors import InputError
from stateline.settings import Count, Fraction, NotNegative, Positive, Settings, Share, Size

_FALLING = ("linear", "cosine", "wsd")

_NEEDED = (
    ("schedule_steps", "schedule", _FALLING),
    ("decay_steps", "schedule", ("wsd",)),
    ("final_share", "schedule", _FALLING),
    ("muon_lr", "optimizer", ("muon",)),
)
"""Settings that need one of some choices of another setting."""


@dataclass(frozen=True)
class TrainConfig(Settings):
    """The optimizer, with a learning-rate schedule.

    Attributes:
        steps: Number of updates.
        lr: Highest learning rate.
        ssm_lr: Highest learning rate of the step sizes, transitions and input maps of state space
            layers; by default the smaller of ``lr`` and 0.001, as in the official H3
            configurations.
        optimizer: ``adamw``; or ``adafactor``, which has no momentum and multiplies ``lr`` by the
            size of each parameter (PyTorch's, without its limit of 1/sqrt(t) on the rate); or
            ``adafactor_momentum``, which averages the changes of ``adafactor`` by ``beta1``; or
            PyTorch's ``muon`` for the linear maps of the blocks (of each expert separately), with
            ``adamw`` for all other parameters, such as embeddings, heads, vectors, state spaces and
            LSTMs. Muon's momentum is always 0.95.
        muon_lr: Highest learning rate of the matrices that Muon updates; by default ``lr``, at
            which the updates of both optimizers have the same size.
        muon_heads: Muon changes each head of a projection by itself. In any case it changes each
            projection by itself, also where several are one matrix.
        weight_decay: Weight decay of matrices; norms, biases and the parameters under ``ssm_lr``
            are not decayed.
        decay_vectors: Decay norms and biases, too, as the official H3 code does.
        decay_all: Decay every parameter, also those that layers exclude (the decay rates and skips
            of Mamba, state spaces), as plain AdamW does.
        beta1: Decay rate of the running mean of gradients, for AdamW; for ``adafactor_momentum``,
            of changes.
        beta2: Decay rate of the running mean of squared gradients, for AdamW.
        accumulate: Batches whose gradients are summed for one update.
        precision: ``bfloat16`` computes matrix products in bfloat16 (autocast); weights, the
            optimizer and accumulating states stay in float32.
        checkpoint_activations: Activation checkpointing: keep only the input of every block for
            the backward pass and compute the rest again. Saves memory, takes about a third more
            time.
        loss_chunk: Compute logits and loss of this many positions at a time, and the logits again
            in the backward pass, for language models. Saves the memory of the other logits: 12
            bytes for each position and token of the vocabulary.
        compile: Compile the forward and backward passes with ``torch.compile``. The first steps
            are slow; compilation changes the losses only by rounding. On a CPU, measure before you
            use it: compiled models have PyTorch's attention and linear maps in place of our kernels
            (``examples/beside_peers.py --only updates --compiled`` times both).
        carry_state: Start each batch from the state after the batch before (truncated
            backpropagation through time). The task must continue from batch to batch:
            ``algorithm``, ``random_walk``, or a text, which is then read in order.
        carry_cap: Number of tokens after which a carried state is reset; needed if the state
            grows.
        segment_len: Cut backpropagation after this many tokens of a row; by default rows are not
            cut.
        schedule: Learning rate after the warm-up, as a share of the highest: ``constant``, 1;
            ``linear``, r + (1 - r) x; ``cosine``, r + (1 - r) (1 - cos(pi x)) / 2; or ``wsd``,
            constant and then linear, r + (1 - r) min(1, (T - t) / n). In update t, counted from 0,
            x = (T - t) / (T - w) after a warm-up of w updates; r is ``final_share``, T is
            ``schedule_steps``, and n is ``decay_steps``.
        schedule_steps: Update at which ``linear``, ``cosine`` or ``wsd`` ends; the learning rate
            then stays as it is. By default the last one.
        decay_steps: For ``wsd``: updates in which the learning rate falls, by default a tenth of
            those until its end, but at least 2; at most those after the warm-up.
        final_share: Learning rate at the end of ``linear``, ``cosine`` or ``wsd`` as a share of the
            highest, from 0 to 1; by default 0.1 for ``cosine`` and 0 for the others.
        warmup_steps: Updates in which the learning rate rises linearly; at most half of all
            updates.
        warmup_from_zero: Whether the learning rate of the first update is zero, as in most official
            code. By default it is the first part of the warm-up.
        warmup_overlaps: Count the schedule from the first update instead of from the end of the
            warm-up, as the official H3 code does.
        clip: Largest norm of the whole gradient; 0 switches clipping off.
        max_skipped: Updates in a row that may be skipped because their loss or gradient is not
            finite; one more ends the run. A carried state then begins anew.
        ema: Decay rate d of the exponential moving average m of the weights w, m = d m + (1 - d) w
            after each update, beginning at the weights after the first. Scores during training and
            the model at the end have these weights.
        log_every: Updates between two lines of metrics.
        eval_every: Updates between two scores at the training length; 0 scores only at the end.
        stop_at: Stop when the score at the training length is at least as good as this.
        keep_best: Keep the checkpoint with the best score at the training length, whatever
            ``keep`` is; the model at the end has its weights. A task on files then scores a part
            of its training data, which is held out, until the end.
        patience: Stop after this many scores that are no better than the best before (early
            stopping); data are held out as for ``keep_best``.
        best_length: Length at which ``keep_best`` and ``patience`` compare scores; by default the
            training length.
        save_every: Updates between two checkpoints; 0 saves only at the end.
        keep: Number of checkpoints to keep.
        parallel: With several processes: ``ddp`` (each has the whole model) or ``fsdp`` (each has
            a part of every parameter).
        shard: How many processes hold one copy of the model together, each a part of every
            parameter: 1 is ``ddp``, all of them are ``fsdp``, and a number between makes several
            sharded copies (HSDP). By default ``parallel`` decides.
        seed: Seed of the data, of the masks of dropout, and of the initial weights.
        init_seed: Another seed of the initial weights. With it, runs can differ in these weights
            alone, or share them and differ in the rest.
        freeze: Weights that stay as they are: patterns of their names, separated by spaces, such
            as ``embedding.* *.norm.*``.
        rates: Highest learning rates of some weights: patterns of their names with a rate each,
            such as ``stack.layers.0.*=1e-3 *.layer.qkv.*=1e-4``; the first that fits counts.
        teacher: Folder of a language model to learn from, in place of the task's own loss
            (distillation); or ``hf:`` and a folder that the package transformers reads, for
            ``match=logits``.
        match: What is compared with the teacher: ``logits``, the distributions of the next token;
            ``mixing``, the weights with which layers that replace others sum the values of
            earlier positions, each on the teacher's input of the layer; ``outputs`` of these
            layers, by the norm of the difference; ``squares``, the same by 1,000 times its mean
            square; or ``blocks``, the outputs of the replaced layers with the feed-forwards behind
            them, by the norm. All but ``logits`` train these layers alone.
        teacher_outputs: Folder in which what the teacher gives for each batch is kept, for other
            runs on the same batches. Logits take 4 bytes for each position and token of the
            vocabulary.
        temperature: For ``logits``: the divisor of the logits of both.

    Raises:
        InputError: If a setting is of the wrong type or out of range.
    """

    owner: ClassVar[str] = "the training configuration"

    steps: Count = 1000
    lr: Positive = 1e-3
    ssm_lr: Positive | None = None
    optimizer: Literal["adamw", "adafactor", "adafactor_momentum", "muon"] = "adamw"
    muon_lr: Positive | None = None
    muon_heads: bool = False
    weight_decay: NotNegative = 0.1
    decay_vectors: bool = False
    decay_all: bool = False
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    accumulate: Count = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpoint_activations: bool = False
    loss_chunk: Count | None = None
    compile: bool = False
    carry_state: bool = False
    carry_cap: Count | None = None
    segment_len: Count | None = None
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    schedule_steps: Count | None = None
    decay_steps: Count | None = None
    final_share: Share | None = None
    warmup_steps: Size = 100
    warmup_from_zero: bool = False
    warmup_overlaps: bool = False
    clip: NotNegative = 1.0
    max_skipped: Size = 0
    ema: Fraction | None = None
    log_every: Count = 50
    eval_every: Size = 100
    stop_at: float | None = None
    keep_best: bool = False
    patience: Count | None = None
    best_length: Count | None = None
    save_every: Size = 500
    keep: Count = 2
    parallel: Literal["ddp", "fsdp"] = "ddp"
    shard: Count | None = None
    seed: Size = 0
    init_seed: Size | None = None
    freeze: str = ""
    rates: str = ""
    teacher: str | None = None
    match: Literal["logits", "mixing", "outputs", "blocks", "squares"] = "logits"
    teacher_outputs: str | None = None
    temperature: Positive = 1.0

    def __post_init__(self) -> None:
        end = self.schedule_steps or self.steps
        if self.decay_steps is not None and self.decay_steps > end:
            raise InputError(
                f"decay_steps must be at most the {end} updates of the schedule, got "
                f"{self.decay_steps}"
            )
        if self.carry_cap is not None and not self.carry_state:
            raise InputError("carry_cap limits a carried state: set carry_state, too")
        self._check_choices()
        _ = self.named_rates
        self._check_teacher()
        if not self.eval_every and (self.keep_best or self.patience):
            raise InputError("keep_best and patience need scores: set eval_every above 0")
        if self.best_length is not None and not self.chooses:
            raise InputError("best_length chooses by keep_best or patience: set one of them")

    @property
    def named_rates(self) -> list[tuple[str, float]]:
        """Patterns of names, and the highest learning rate of each.

        Raises:
            InputError: If ``rates`` is not of this form.
        """
        found = []
        for word in self.rates.split():
            pattern, _, text = word.rpartition("=")
            try:
                rate = float(text)
            except ValueError:
                rate = math.nan
            if not pattern or not 0 < rate < math.inf:
                raise InputError(
                    "rates must be patterns of names with a positive rate each, such as "
                    f"'embedding.*=1e-4', got {word!r:.60}"
                )
            found.append((pattern, rate))
        return found

    @property
    def chooses(self) -> bool:
        """Whether scores during training choose the model at the end."""
        return self.keep_best or self.patience is not None

    def _check_teacher(self) -> None:
        if self.teacher is not None and (self.carry_state or self.loss_chunk or self.segment_len):
            raise InputError(
                "a teacher reads whole rows: leave out carry_state, segment_len and loss_chunk"
            )
        own = (self.match, self.temperature, self.teacher_outputs)
        if self.teacher is None and own != ("logits", 1.0, None):
            raise InputError(
                "match, temperature and teacher_outputs are about a teacher: set teacher, too"
            )

    def _check_choices(self) -> None:
        for name, choice, needed in _NEEDED:
            chosen = getattr(self, choice)
            if getattr(self, name) is not None and chosen not in needed:
                one = " or ".join(needed)
                raise InputError(
                    f"{name} is for {choice}={one}, got {choice}={chosen}: leave it out, or take "
                    f"{one}"
                )
        adafactor = self.optimizer.startswith("adafactor")
        if adafactor and (self.shard or self.parallel) not in (1, "ddp"):
            raise InputError("adafactor works with whole parameters: take parallel=ddp")
