"""Probes of what a language model retrieves from its context: Repeat After Me, section 4."""

from stateline.probe.load import load_reader
from stateline.probe.material import Material
from stateline.probe.prompts import Entry, Example
from stateline.probe.reader import Reader, StatelineReader
from stateline.probe.results import Point, ProbeResults
from stateline.probe.run import Plan, Settings, ask, is_probe, read_probes, run_probes, score_probe
from stateline.probe.scoring import exact_match, f1, normalised
from stateline.probe.tasks import PROBES, Probe, make_examples

__all__ = [
    "PROBES",
    "Entry",
    "Example",
    "Material",
    "Plan",
    "Point",
    "Probe",
    "ProbeResults",
    "Reader",
    "Settings",
    "StatelineReader",
    "ask",
    "exact_match",
    "f1",
    "is_probe",
    "load_reader",
    "make_examples",
    "normalised",
    "read_probes",
    "run_probes",
    "score_probe",
]
