"""Generation: from a prompt, or a state that was kept, to the tokens and the text that follow."""

from stateline.generate.kept import Kept, load_kept, save_kept
from stateline.generate.pieces import read_pieces, token_pieces
from stateline.generate.runs import NumberTokenizer, growing_layers, load_run
from stateline.generate.sampling import GREEDY, Sampling, choose, uniform
from stateline.generate.session import (
    Choice,
    Session,
    SessionState,
    begin,
    read,
    seeded,
)
from stateline.generate.text import HeldText, TextStream, Written, write
from stateline.generate.tokens import check_length, generate, stream

__all__ = [
    "GREEDY",
    "Choice",
    "HeldText",
    "Kept",
    "NumberTokenizer",
    "Sampling",
    "Session",
    "SessionState",
    "TextStream",
    "Written",
    "begin",
    "check_length",
    "choose",
    "generate",
    "growing_layers",
    "load_kept",
    "load_run",
    "read",
    "read_pieces",
    "save_kept",
    "seeded",
    "stream",
    "token_pieces",
    "uniform",
    "write",
]
