"""Reading rows of different lengths together, without padding."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.generate.session import PREFILL_CHUNK
from stateline.layers import cat_states, select_rows
from stateline.models.language_model import LanguageModel, LanguageModelState


def read_ragged(
    model: LanguageModel,
    rows: Sequence[Int[Tensor, "_"]],
    state: LanguageModelState,
    *,
    keep: int | None = None,
) -> tuple[list[Float[Tensor, "_ vocab"]], LanguageModelState]:
    """Read the next tokens of a batch, a different number in each row.

    The batch is read up to the end of the shortest row; that row is set aside, the others continue,
    and the states are joined at the end. So no layer needs a mask, no padding is computed, and no
    token is read twice; the number of calls is the number of different lengths.

    Args:
        model: A language model.
        rows: Tokens of each row, on the model's device; there may be none.
        state: State of as many rows.
        keep: Return logits of at most this many last tokens of each row; by default of all.

    Returns:
        The logits after each token of each row, and the state after all of them.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8))
        >>> rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
        >>> logits, state = read_ragged(model, rows, model.init_state(2))
        >>> [len(row) for row in logits], state.position.tolist()
        ([3, 1], [3, 1])
    """
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    weight = model.embedding.weight
    nothing = torch.zeros(0, model.config.vocab_size, dtype=weight.dtype, device=weight.device)
    pieces: list[list[Tensor]] = [[nothing] for _ in rows]
    state, done, start, going = select_rows(state, order), [], 0, order
    for end in sorted({len(row) for row in rows}):
        for first in range(start, end, PREFILL_CHUNK):
            last = min(first + PREFILL_CHUNK, end)
            tokens = torch.stack([rows[row][first:last] for row in going])
            logits, state = model.forward_chunk(tokens, state, keep=keep)
            for row, found in zip(going, logits, strict=True):
                pieces[row].append(found)
        ended = sum(len(rows[row]) == end for row in going)
        done.append(select_rows(state, range(ended)))
        state = select_rows(state, range(ended, len(going)))
        start, going = end, going[ended:]
    joined = [torch.cat(parts) for parts in pieces]
    kept = [found if keep is None else found[max(0, len(found) - keep) :] for found in joined]
    return kept, select_rows(cat_states(done), torch.tensor(order).argsort())
