"""Score a published model by lm-evaluation-harness's own runner and class, and by Stateline.

Run it: python examples/lm_eval_beside.py MODEL DATA --limit 100 --pages 2

MODEL is a folder that transformers reads. DATA has the files of SuperGLUE and WikiText-2 that
`stateline evaluate --tasks` reads. The tasks are those of the package lm_eval, on these files in
place of those on a network; `stateline evaluate --tasks_path` runs the same files.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from stateline.evaluate.harness import run_suite
from stateline.evaluate.harness.tasks import task_settings
from stateline.generate import load_run

CLASSES = {
    "cb": ["entailment", "contradiction", "neutral"],
    "sglue_rte": ["entailment", "not_entailment"],
}
"""Order of the labels in lm-eval's tasks, where they are names."""

FILES = {"boolq": "BoolQ", "cb": "CB", "copa": "COPA", "sglue_rte": "RTE"}
YAML = {
    "boolq": "super_glue/boolq/default.yaml",
    "cb": "super_glue/cb/default.yaml",
    "copa": "super_glue/copa/default.yaml",
    "sglue_rte": "super_glue/rte/default.yaml",
    "wikitext": "wikitext/wikitext.yaml",
}
"""Files of tasks in the package lm_eval."""


def rows(data: Path, task: str, split: str) -> Iterator[dict[str, Any]]:
    """Examples with numbers for labels."""
    if task == "wikitext":
        yield from task_settings(task, data, None)["custom_dataset"]()["test"]
        return
    file = "train" if split == "train" else "val"
    for line in (data / FILES[task] / f"{file}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        label = row["label"]
        row["label"] = CLASSES[task].index(label) if task in CLASSES else int(label)
        yield row


def official(data: Path, home: Path, task: str) -> str:
    """The file of a task of lm-eval that reads local files in place of those on a network."""
    files = {}
    for name in ("train", "validation", "test"):
        file = home / f"{task}-{name}.jsonl"
        text = "".join(json.dumps(row) + "\n" for row in rows(data, task, name))
        file.write_text(text, encoding="utf-8")
        files[name] = str(file)
    include = Path(lm_eval.__file__).parent / "tasks" / YAML[task]
    given = {"include": str(include), "task": task, "dataset_path": "json", "dataset_name": None}
    path = home / f"{task}.yaml"
    path.write_text(json.dumps(given | {"dataset_kwargs": {"data_files": files}}))
    return str(path)


def main(model: str, data: Path, limit: int, pages: int) -> None:
    """Print each score twice."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    ours, tokenizer = load_run(model)
    manager = TaskManager(include_defaults=False)
    lm = HFLM(model, device="cpu", batch_size=8, dtype="float32")
    with tempfile.TemporaryDirectory() as home:
        for task in [*FILES, "wikitext"]:
            most = pages if task == "wikitext" else limit
            begin = time.perf_counter()
            found = lm_eval.simple_evaluate(
                model=lm,
                tasks=[official(data, Path(home), task)],
                task_manager=manager,
                limit=most,
                bootstrap_iters=0,
            )
            middle = time.perf_counter()
            (scores,) = found["results"].values()
            own = run_suite(ours, tokenizer, [task], tasks_path=home, limit=most)
            end = time.perf_counter()
            for one in own:
                print(
                    f"{one.task:9} {one.name:16} {one.examples:4} examples: lm-eval "
                    f"{scores[one.name + ',none']:.6f} in {middle - begin:.0f} s, stateline "
                    f"{one.value:.6f} in {end - middle:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--pages", type=int, default=2)
    main(**vars(parser.parse_args()))
