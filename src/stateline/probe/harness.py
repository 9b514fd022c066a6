"""Probes as tasks of lm-evaluation-harness."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.task import ConfigurableTask

from stateline.errors import InputError
from stateline.probe.material import Material
from stateline.probe.prompts import Example
from stateline.probe.reader import Reader
from stateline.probe.run import Settings, answer_limits
from stateline.probe.tasks import PROBES, make_examples

_NAMED = re.compile(rf"({'|'.join(PROBES)})(?:_([1-9]\d*))?")


class ProbeTask(ConfigurableTask):
    """A probe at one length. It gives any model of the harness the score of ``stateline probe``.

    Args:
        name: A key of ``PROBES``.
        examples: What :func:`~stateline.probe.make_examples` gives.
        limits: New tokens of each answer, from :func:`~stateline.probe.run.answer_limits`.
        task: Name of the task; by default that of the probe.
    """

    def __init__(
        self,
        name: str,
        examples: Sequence[Example],
        limits: Sequence[int],
        *,
        task: str = "",
    ) -> None:
        self._probe = probe = PROBES[name]
        rows = [
            {"prompt": prompt, "accepted": list(accepted), "limit": limit}
            for (prompt, accepted), limit in zip(examples, limits, strict=True)
        ]

        def dataset(**_: Any) -> dict[str, Any]:
            from datasets import Dataset

            return {"test": Dataset.from_list(rows)}

        settings = {
            "task": task or name,
            "custom_dataset": dataset,
            "metadata": {"version": 1.0},
            "output_type": "generate_until",
            "test_split": "test",
            "num_fewshot": 0,
            "doc_to_text": lambda row: row["prompt"],
            "doc_to_target": lambda row: row["accepted"][0],
            "target_delimiter": "",
            "generation_kwargs": {
                "until": [probe.stop],
                "do_sample": False,
                **({"min_new_tokens": 1} if probe.never_empty else {}),
            },
            "process_results": self._score,
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True}
                for metric in ("exact_match", "f1")
            ],
        }
        super().__init__(config=settings)

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> Any:
        """The request of an example, with the limit of its answer."""
        request = super().construct_requests(doc, ctx, **kwargs)
        context, settings = request.arguments
        request.arguments = (context, settings | {"max_gen_toks": doc["limit"]})
        return request

    def _score(self, row: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
        example = Example(row["prompt"], tuple(row["accepted"]))
        match, f1 = self._probe.score(example, results[0])
        return {"exact_match": match, "f1": f1}


def probe_tasks(
    name: str,
    material: Material,
    reader: Reader,
    *,
    limit: int | None = None,
) -> list[ProbeTask]:
    """The tasks that a name asks for; none if it is not the name of a probe.

    Args:
        name: ``copy`` for each of the probe's own lengths, ``copy_50`` for one length.
        material: Names, documents and questions.
        reader: The model, whose tokenizer and longest text the examples depend on.
        limit: Only the first examples; by default as many as ``stateline probe`` draws.

    Raises:
        InputError: If the limit is not positive, data is missing or too short for a length, or the
            model cannot read so long a prompt.
    """
    if (named := _NAMED.fullmatch(name)) is None:
        return []
    probe, length = named.groups()
    lengths = [int(length)] if length else PROBES[probe].lengths
    n = Settings().batches * Settings().examples if limit is None else limit
    if n < 1:
        raise InputError(f"limit must be at least 1, got {n}")
    return [_task(probe, size, n, material, reader) for size in lengths]


def _task(probe: str, size: int, n: int, material: Material, reader: Reader) -> ProbeTask:
    name = f"{probe}_{size}"
    examples = make_examples(
        probe, size, n, material=material, encode=reader.encode, decode=reader.decode
    )
    prompts = [reader.prompt(example.prompt) for example in examples]
    limits, too_long = answer_limits(reader, PROBES[probe], examples, prompts)
    if too_long:
        raise InputError(f"{name} {too_long}: take a lower length, as {probe}_{size // 2 or 1}")
    return ProbeTask(probe, examples, limits, task=name)
