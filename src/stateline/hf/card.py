"""The model card of an exported model: its layers, the size of its state, its scores."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from stateline.layers.state import fingerprint
from stateline.models.language_model import LanguageModel
from stateline.runs.folder import RESULTS, read_results, read_run
from stateline.runs.results import RunRecord

CARD = "README.md"

LENGTHS = (256, 1024, 4096, 16384, 65536)

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- stateline
---

# {pattern}

A causal language model made with Stateline.

| | |
|---|---|
| layers | `{pattern}` |
| parameters | {parameters:,} |
| width | {d_model:,} |
| vocabulary | {vocab_size:,} |
| longest text | {longest} |
| precision | {dtype} |

```python
import stateline.hf  # registers the architecture
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("this folder")
```

## Size of the state

Memory of one text while it is decoded.

"""


def find_record(folder: Path) -> RunRecord | None:
    """The result of a training run; ``None`` if its folder holds none.

    Raises:
        InputError: If there is one but it is damaged.
    """
    if (found := read_run(folder)) is None and (folder / RESULTS).exists():
        return next(iter(read_results(folder).runs), None)
    return found


def card(model: LanguageModel, record: RunRecord | None = None) -> str:
    """The text of the card of a model, with the result of its training if that is known."""
    config = model.config
    head = _HEAD.format(
        pattern=config.pattern,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        d_model=config.d_model,
        vocab_size=config.vocab_size,
        longest="any length" if model.max_len is None else f"{model.max_len:,} tokens",
        dtype=str(model.dtype).removeprefix("torch."),
    )
    lengths = [n for n in LENGTHS if model.max_len is None or n <= model.max_len]
    rows = [(f"{n:,}", f"{model.state_bytes(n):,}") for n in lengths or [model.max_len or 1]]
    scores = "" if record is None else _scores(record, model)
    return head + _table(("tokens", "bytes"), rows) + scores


def _scores(record: RunRecord, model: LanguageModel) -> str:
    metrics = sorted({name for scores in record.by_length.values() for name in scores})
    rows = [
        (f"{length:,}", *(_cell(scores, name) for name in metrics))
        for length, scores in sorted(record.by_length.items())
    ]
    text = f"\n## Scores\n\nTrained on `{record.task}` for {record.steps:,} updates.\n\n"
    told = (
        f"\nThey are scores of the weights with the hash `{fingerprint(model)['weights']}`. After "
        "a change, `stateline.layers.state.fingerprint(model.model)` gives another.\n"
    )
    return text + _table(("length", *metrics), rows) + told


def _cell(scores: Mapping[str, float | None], name: str) -> str:
    """A score; a dash if it was not measured."""
    value = scores.get(name, math.nan)
    if value is None:
        return "diverged"
    return "\N{EN DASH}" if math.isnan(value) else f"{value:.4g}"


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heading, ("---:",) * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
