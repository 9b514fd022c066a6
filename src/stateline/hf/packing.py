"""Where texts begin in packed rows, from the three arguments that transformers has for it."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from stateline.errors import InputError


def text_starts(
    ids: Int[Tensor, "batch length"],
    mask: Bool[Tensor, "batch length"] | None,
    positions: Tensor | None,
    numbers: Tensor | None,
    borders: Tensor | None,
    *,
    fresh: bool,
) -> Bool[Tensor, "batch length"] | None:
    """The first token of every text.

    Args:
        ids: Tokens.
        mask: True at tokens, False at padding; ``None`` if there is no padding.
        positions: The ``position_ids``, which start from 0 in each text.
        numbers: The ``seq_idx``: the number of each token's text.
        borders: The ``cu_seq_lens_q``: the borders of the texts of one row.
        fresh: Nothing was read before, so a text begins with the row.

    Returns:
        True where a text begins; ``None`` if no argument marks a text.

    Raises:
        InputError: If an argument has another shape or order, or packed rows have padding.
    """
    for name, value in (("position_ids", positions), ("seq_idx", numbers)):
        if value is not None and value.shape not in (ids.shape, (1, ids.shape[1])):
            raise InputError(
                f"{name} must have the shape of input_ids, {tuple(ids.shape)}, got "
                f"{tuple(value.shape)}"
            )
    found = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    if positions is not None and not _count_one_text(positions, mask, fresh):
        found |= _starts_from_positions(positions, fresh)
    if numbers is not None:
        found[:, 1:] |= numbers[:, 1:] != numbers[:, :-1]
    if borders is not None:
        found |= _starts_from_borders(borders, ids)
    if not bool(found.any()):
        return None
    if mask is not None:
        raise InputError(
            "packed rows have no padding: leave attention_mask out, or the borders of the texts"
        )
    return found


def _count_one_text(positions: Tensor, mask: Tensor | None, fresh: bool) -> bool:
    """Whether positions count the tokens of one padded text per row, without the padding."""
    if mask is None:
        return False
    before = positions - mask.cumsum(dim=1)
    first = mask.to(torch.uint8).argmax(dim=1, keepdim=True)
    wanted = before.new_full(first.shape, -1) if fresh else before.gather(1, first)
    return bool(((before == wanted) | ~mask).all())


def _starts_from_positions(positions: Tensor, fresh: bool) -> Bool[Tensor, "rows length"]:
    begins = positions == 0
    follows = positions[:, 1:] == positions[:, :-1] + 1
    if not bool((begins[:, 1:] | follows).all()) or (fresh and not bool(begins[:, :1].all())):
        raise InputError(
            "position_ids must count from 0 in each text of a row: padding is said by "
            "attention_mask instead"
        )
    return begins


def _starts_from_borders(borders: Tensor, ids: Tensor) -> Bool[Tensor, "row length"]:
    rises = bool((borders.diff(prepend=borders.new_zeros(1)) >= 0).all())
    if len(ids) != 1 or not rises or int(borders[-1]) != ids.shape[1]:
        raise InputError(
            "cu_seq_lens_q is for one row and must rise from 0 and end with its length, got "
            f"{borders.tolist()} and input_ids of shape {tuple(ids.shape)}"
        )
    begins = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    begins[0, borders[borders < ids.shape[1]].long()] = True  # no text begins at the end of the row
    return begins
