"""Models whose weights are set by a proof, not by training."""

from stateline.models.constructions.automaton import Automaton, queue_automaton
from stateline.models.constructions.induction_head import induction_head
from stateline.models.constructions.ngram_copier import ngram_copier
from stateline.models.constructions.recall_h3 import recall_h3

__all__ = ["Automaton", "induction_head", "ngram_copier", "queue_automaton", "recall_h3"]
