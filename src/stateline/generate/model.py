"""A model with its tokenizer: reading a folder, writing text, looking inside, saving."""

from collections.abc import Sequence
from pathlib import Path
from typing import overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.data import Tokenizer
from stateline.data.tokenizer import FILE, ByteTokenizer
from stateline.generate.runs import NumberTokenizer, Weights, load_run
from stateline.generate.sampling import GREEDY, Sampling
from stateline.generate.session import Session
from stateline.generate.session_state import check_model, prompt_lengths
from stateline.generate.text import TextStream, decode_text
from stateline.generate.tokens import check_length
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel


class Model:
    """A language model and its tokenizer.

    Args:
        module: The language model, a ``torch.nn.Module``; it is put into evaluation mode.
        tokenizer: Its tokenizer; by default bytes if it has 256 tokens, else token numbers.

    Attributes:
        module: The language model, for training, states and everything else.
        tokenizer: Its tokenizer.

    Example:
        >>> model = Model(LanguageModel(ModelConfig("h3", vocab_size=256, d_model=8)))
        >>> len(model.generate("once upon", 4, seed=1)) > 0
        True
    """

    def __init__(self, module: LanguageModel, tokenizer: Tokenizer | None = None) -> None:
        check_model(module)
        size = module.config.vocab_size
        default = ByteTokenizer() if size == 256 else NumberTokenizer(size)
        self.module, self.tokenizer = module.eval(), tokenizer or default

    @property
    def config(self) -> ModelConfig:
        """The configuration of the model."""
        return self.module.config

    @overload
    def generate(
        self,
        prompt: str,
        max_new_tokens: int = ...,
        *,
        sampling: Sampling = ...,
        seed: int = ...,
        stop: Sequence[str] = ...,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        max_new_tokens: int = ...,
        *,
        sampling: Sampling = ...,
        seed: int = ...,
        stop: Sequence[str] = ...,
    ) -> list[str]: ...

    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        max_new_tokens: int = 100,
        *,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> str | list[str]:
        """The text that follows a prompt, or each of several; an end token ends it.

        ``stateline generate`` has other defaults: 256 tokens at the temperature 0.8.

        Args:
            prompt: At least one token; several prompts are decoded together.
            max_new_tokens: Largest number of tokens to add.
            sampling: How tokens are chosen; by default always the most likely one.
            seed: Seed of the random choices.
            stop: Strings before which the text ends, or one such string.

        Raises:
            InputError: If a prompt is empty, has an unknown token, or is too long for a model
                with learned positions; if a stop string is empty; if the model gives NaN.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        rows = [self._tokens(each)[0] for each in prompts]
        texts = [TextStream(self.tokenizer, stop, after=row.tolist()) for row in rows]
        check_length(self.module, max(prompt_lengths(rows)), max_new_tokens)
        session = Session.after(self.module, rows, seed=seed, sampling=sampling)
        found = [""] * len(rows)
        for decoded in decode_text(session, texts, max_new_tokens):
            found[decoded.row] += decoded.text
        found = [new + text.finish() for new, text in zip(found, texts, strict=True)]
        return found[0] if isinstance(prompt, str) else found

    @torch.inference_mode()
    def hidden_states(
        self, text: str | Int[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch length d_model"], ...]:
        """Input of the first layer and output of each layer, at every position.

        Args:
            text: A text, whose positions begin with those of the tokens that begin it (see
                ``Tokenizer.prompt``), or tokens.
        """
        tokens = self._tokens(text) if isinstance(text, str) else text
        return self.module.hidden_states(tokens.to(self.module.device))

    def save(self, folder: str | Path) -> None:
        """Write the model and its tokenizer into a folder, from which :func:`load` reads them.

        Raises:
            InputError: If the folder cannot be written to.
        """
        save_model(self.module, folder)
        if not isinstance(self.tokenizer, NumberTokenizer):
            self.tokenizer.save(Path(folder) / FILE)

    def _tokens(self, text: str) -> Int[Tensor, "1 length"]:
        return torch.from_numpy(self.tokenizer.prompt(text))[None].long()


def load(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    weights: Weights | None = None,
) -> Model:
    """Read a language model and its tokenizer.

    Args:
        folder: Folder of a model, a run, or a checkpoint, or of a published model.
        device: Device of the model.
        dtype: Precision of the weights; by default that in which they were saved.
        weights: ``"int8"`` rounds the large matrices to integers of 8 bits, for decoding: see
            :meth:`LanguageModel.to_int8_ <stateline.LanguageModel.to_int8_>`.

    Raises:
        InputError: If a file is missing or damaged, or the model is a classifier or regressor
            (read these with ``load_classifier`` and ``load_regressor``).
    """
    return Model(*load_run(folder, device=device, dtype=dtype, weights=weights))
