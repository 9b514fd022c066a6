"""Random prompts of a wanted number of tokens, for a tokenizer that only the server knows."""

import random
import string

from stateline.errors import InputError
from stateline.server_check.client import Refused, Server

_UNITS = (
    [f" {letter}" for letter in string.ascii_lowercase],
    list(string.ascii_lowercase),
    list("abcdefgh"),
    [f"{digit} " for digit in range(10)],
)
"""Sets of pieces of text. The check uses the first set in which each piece is one token."""


class Prompts:
    """Draws prompts, after asking the server how long some are.

    Raises:
        InputError: If the server takes none of the prompts.
    """

    def __init__(self, server: Server, seed: int) -> None:
        self._random = random.Random(seed)
        for units in _UNITS:
            self._units, self._extra = units, 0
            try:
                counts = [server.ask(self.draw(n), 1).prompt_tokens for n in (8, 40, 40)]
            except Refused:
                continue
            if counts == [counts[0], counts[0] + 32, counts[0] + 32]:
                self._extra = counts[0] - 8
                return
        raise InputError(
            f"{server.url} takes no prompt of letters or digits whose tokens it counts one by one: "
            "it cannot be checked"
        )

    def draw(self, tokens: int) -> str:
        """A prompt of this many tokens, including tokens that the server adds."""
        return self.more(max(1, tokens - self._extra))

    def more(self, tokens: int) -> str:
        """A text of this many tokens that continues a prompt."""
        return "".join(self._random.choices(self._units, k=tokens))
