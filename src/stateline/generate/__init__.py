"""Generation: from a prompt or a kept state to the tokens and the text that follow."""

from stateline.generate.answers import answer
from stateline.generate.drift import Drift, drift
from stateline.generate.model import Model, load
from stateline.generate.prefixes import PrefixStates, Read
from stateline.generate.random import uniform
from stateline.generate.reading import prefill_chunks, read_ragged, token_chunks
from stateline.generate.runs import NumberTokenizer, growing_layers, load_run
from stateline.generate.sampling import GREEDY, Penalties, Sampling, choose, pick, probabilities
from stateline.generate.session import Choice, Session
from stateline.generate.session_state import SessionState, extend, prefill, seeded
from stateline.generate.speculative import AHEAD, Speculation
from stateline.generate.state_files import Kept, load_kept
from stateline.generate.text import DecodedToken, HeldText, TextStream, decode_text
from stateline.generate.tokens import check_length, generate, stream

__all__ = [
    "AHEAD",
    "GREEDY",
    "Choice",
    "DecodedToken",
    "Drift",
    "HeldText",
    "Kept",
    "Model",
    "NumberTokenizer",
    "Penalties",
    "PrefixStates",
    "Read",
    "Sampling",
    "Session",
    "SessionState",
    "Speculation",
    "TextStream",
    "answer",
    "check_length",
    "choose",
    "decode_text",
    "drift",
    "extend",
    "generate",
    "growing_layers",
    "load",
    "load_kept",
    "load_run",
    "pick",
    "prefill",
    "prefill_chunks",
    "probabilities",
    "read_ragged",
    "seeded",
    "stream",
    "token_chunks",
    "uniform",
]
