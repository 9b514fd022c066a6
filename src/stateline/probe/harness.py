"""Probes as tasks of lm-evaluation-harness."""

from collections.abc import Mapping, Sequence
from typing import Any

from stateline.probe.prompts import Example
from stateline.probe.tasks import PROBES


def harness_settings(
    name: str, examples: Sequence[Example], *, longest_prompt: int
) -> dict[str, Any]:
    """The settings of a probe as a task, for ``lm_eval.api.task.ConfigurableTask(config=...)``.

    The harness runs the task with any of its models. It cannot forbid an end token as the first
    token of an answer, as ``stateline probe`` does in ``squad``.

    Args:
        name: A key of ``PROBES``.
        examples: What :func:`~stateline.probe.make_examples` gives.
        longest_prompt: Tokens of the longest prompt, which limit the answers.
    """
    probe = PROBES[name]
    rows = [{"prompt": prompt, "accepted": list(accepted)} for prompt, accepted in examples]

    def dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list(rows)}

    def score(row: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
        match, f1 = probe.score(Example(row["prompt"], tuple(row["accepted"])), results[0])
        return {"exact_match": match, "f1": f1}

    return {
        "task": name,
        "custom_dataset": dataset,
        "metadata": {"version": 1.0},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": lambda row: row["prompt"],
        "doc_to_target": lambda row: row["accepted"][0],
        "target_delimiter": "",
        "generation_kwargs": {
            "until": [probe.stop],
            "max_gen_toks": probe.new_tokens(longest_prompt),
            "do_sample": False,
        },
        "process_results": score,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in ("exact_match", "f1")
        ],
    }
