"""Models whose weights are constructed by a proof instead of trained."""

from stateline.models.constructions.automaton import Automaton, queue_automaton
from stateline.models.constructions.copying_theory import (
    bits_for_half,
    ngram_copy,
    ngram_for_error,
    repeated_ngram_bound,
)
from stateline.models.constructions.induction_head import induction_head
from stateline.models.constructions.ngram_copier import ngram_copier
from stateline.models.constructions.recall_h3 import recall_h3

__all__ = [
    "Automaton",
    "bits_for_half",
    "induction_head",
    "ngram_copier",
    "ngram_copy",
    "ngram_for_error",
    "queue_automaton",
    "recall_h3",
    "repeated_ngram_bound",
]
