"""Models with finitely many states, and an optimal copier among them."""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers import SequenceLayer


class AutomatonState(NamedTuple):
    """Index of the current state of each row."""

    number: Int[Tensor, " batch"]


class Automaton(SequenceLayer[AutomatonState]):
    r"""A finite state set S with an update and an output, the paper's generalised SSM.

    .. math:: S_i = u(S_{i-1}, x_i), \qquad R_i = r(S_i)

    Maps tokens to logits: 1 for the token :math:`R_i`, 0 for all others. The first state is 0. It
    has no parameters, only the two tables.

    Args:
        update: Next state for each state and token.
        output: Token for each state.

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, section 2.1.
    """

    def __init__(self, update: Int[Tensor, "state token"], output: Int[Tensor, " state"]) -> None:
        super().__init__(update.shape[1])
        self.update: Tensor
        self.output: Tensor
        self.register_buffer("update", update)
        self.register_buffer("output", output)

    @property
    def n_states(self) -> int:
        """Number of states."""
        return len(self.output)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> AutomatonState:  # noqa: ARG002
        """State 0 for every row."""
        return AutomatonState(self.output.new_zeros(batch_size))

    @override
    def forward_chunk(self, x: Tensor, state: AutomatonState) -> tuple[Tensor, AutomatonState]:
        numbers = [state.number]
        for token in x.unbind(dim=1):
            numbers.append(self.update[numbers[-1], token])
        visited = torch.stack(numbers, dim=1)[:, 1:]
        logits = F.one_hot(self.output[visited], self.d_model).float()
        return logits, AutomatonState(numbers[-1])

    def example_input(self, batch_size: int, length: int) -> Int[Tensor, "batch length"]:
        """Random tokens."""
        return torch.randint(self.d_model, (batch_size, length), device=self.output.device)


def queue_automaton(kept: int, *, n_letters: int = 26) -> Automaton:
    r"""An automaton that stores the first ``kept`` letters, repeats them, then outputs letter 0.

    On uniform strings of L letters its error is :math:`1 - D^{m-L}` for m = ``kept`` and D =
    ``n_letters``. It has :math:`D^m` states after SEP, and no automaton with this number of states
    has a lower error. Its tokens are those of the task ``copying``: letters, BOS, SEP, EOS and PAD.

    Raises:
        InputError: If the automaton would have no letter or too many states.

    Example:
        >>> queue_automaton(2, n_letters=3).n_states
        26

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, theorem 2.7, whose bound it meets.
    """
    if n_letters < 1 or kept < 0 or n_letters**kept > 1 << 20:
        raise InputError(
            "n_letters must be at least 1 and n_letters**kept from 1 to 2**20 states, "
            f"got {kept=} and {n_letters=}"
        )
    letters = range(n_letters)
    queues = [q for size in range(kept + 1) for q in itertools.product(letters, repeat=size)]
    reading = {queue: number for number, queue in enumerate(queues)}
    saying = {queue: len(queues) + number for number, queue in enumerate(queues)}
    update = torch.zeros(2 * len(queues), n_letters + 4, dtype=torch.int64)
    for queue in queues:
        for letter in letters:
            update[reading[queue], letter] = reading[(*queue, letter)[:kept]]
        update[reading[queue], n_letters + 1] = saying[queue]  # SEP
        # Any token, its own output included, moves it to the next letter.
        update[saying[queue]] = saying[queue[1:]]
    update[:, n_letters] = reading[()]  # BOS
    output = torch.tensor([queue[0] if queue else 0 for queue in queues])
    return Automaton(update, output.repeat(2))
