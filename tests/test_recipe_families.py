"""Recipes that are compared with each other differ in what is compared, and in nothing else."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from stateline.models.config import ModelConfig
from stateline.models.size import count_parameters
from stateline.pattern import parse_pattern
from stateline.tasks import TASKS
from stateline.tasks.base import Task

FOLDER = Path(__file__).parents[1] / "recipes"
BLOCK_STATE = sorted(path.stem for path in (FOLDER / "block_state").glob("*.yaml"))
TRACKING = sorted(
    path.relative_to(FOLDER).as_posix()
    for task in ("random_walk", "algorithm")
    for path in (FOLDER / "staircase").glob(f"*/{task}_*.yaml")
    if path.parent.name != "tables"
)
STREAMED = [path for path in TRACKING if "global" in path]


def recipe(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}").read_text(encoding="utf-8"))
    return found


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else None
        found |= {f"{prefix}{name}": value} if inner is None else inner
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    one, other = flat(one), flat(other)
    return {name for name in one | other if one.get(name) != other.get(name)} - {"out"}


def without_window(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flat(settings).items() if not name.endswith(".window")}


@pytest.mark.parametrize("name", ["table_9", "table_9_small"])
def test_rows_of_the_long_range_arena_differ_in_the_layer_alone(name: str) -> None:
    rows = recipe(f"h3/tables/{name}.yaml")["rows"]
    for own, other in zip(rows[::2], rows[1::2], strict=True):
        s4d = recipe(f"{own['recipe']}.yaml")["pattern"]
        assert differences(own, other) <= {"label", "pattern", "paper"}
        assert other["pattern"] == s4d.replace("s4d", "h3") != s4d


@pytest.mark.parametrize("name", [name for name in BLOCK_STATE if name.startswith("window_")])
def test_a_window_recipe_differs_from_its_reference_in_windows_alone(name: str) -> None:
    size, model = name.removeprefix("window_").split("_", 1)
    one, reference = (recipe(f"block_state/{n}.yaml") for n in (name, f"length_{model}"))
    assert differences(without_window(one), without_window(reference)) == set()
    windows = {v for n, v in flat(one).items() if n.endswith(".window")}
    assert windows == {int(size)}


@pytest.mark.parametrize(
    ("name", "allowed"),
    [(n, {"pattern"}) for n in BLOCK_STATE if n.startswith("place_")]
    + [(n, {"pattern", "model.d_model"}) for n in BLOCK_STATE if n.startswith("number_")]
    + [(n, {"model.layers.block_state.ssm"}) for n in BLOCK_STATE if n.startswith("state_")]
    + [("lift_full_sh", {"model.layers.block_state.lift", "model.d_model"})],
)
def test_ablations_differ_from_their_reference_in_one_thing(name: str, allowed: set[str]) -> None:
    reference = recipe("block_state/length_block_state_sh.yaml")
    assert differences(recipe(f"block_state/{name}.yaml"), reference) <= allowed


@pytest.mark.parametrize("name", BLOCK_STATE)
def test_models_of_block_state_recipes_have_equal_sizes_and_see_equal_tokens(name: str) -> None:
    given, reference = recipe(f"block_state/{name}.yaml"), recipe("block_state/length_sliding.yaml")
    assert given["task"] == reference["task"]
    assert given["train"] == reference["train"]
    sizes = [
        count_parameters(ModelConfig(r["pattern"], 256, **r["model"])) for r in (given, reference)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.03)


@pytest.mark.parametrize("name", TRACKING)
def test_tracking_recipes_of_a_family_have_one_task_and_run_to_the_end(name: str) -> None:
    folder, file = name.rsplit("/", 1)
    task = "random_walk" if file.startswith("random_walk") else "algorithm"
    one, other = recipe(name), recipe(f"{folder}/{task}_transformer_xl.yaml")
    apart = {"pattern", "train.carry_cap", "train.steps"}
    windows = "model.layers.sliding_attention."
    apart |= {f"{windows}window", f"{windows}includes_self"}
    assert differences(one, other) <= apart
    assert "stop_at" in one["train"]
    assert one["train"]["stop_at"] is None


def unknown_labels(task: Task, cap: int) -> int:
    """Segments in which the cap empties a state although an episode has begun before."""
    positions, found = torch.zeros(task.batch_size, dtype=torch.int64), 0
    for index in range(64):
        batch = task.consecutive_batch(index)
        length = batch.tokens.shape[1]
        capped = ~batch.fresh & (positions + length > cap)
        found += int((capped[:, None] & task.asked(batch.targets)).sum())
        positions = torch.where(batch.fresh | capped, 0, positions) + length
    return found


@pytest.mark.parametrize("name", STREAMED)
def test_no_label_of_a_global_cache_is_asked_after_its_episode_was_forgotten(name: str) -> None:
    given = recipe(name)
    (item,) = parse_pattern(given["task"])
    kind: Any = TASKS[item.name]
    keywords = {**item.keywords, "batch_size": 8}
    assert unknown_labels(kind(**keywords), given["train"]["carry_cap"]) == 0
    assert unknown_labels(kind(**{**keywords, "reset": False}), 512) > 0


SWEEPS = [
    path.relative_to(FOLDER).as_posix()
    for pattern in ("masked_heads_*", "mamba_state_*")
    for path in sorted((FOLDER / "repeat_after_me").glob(f"*/{pattern}.yaml"))
]


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_differs_from_its_reference_in_the_pattern(name: str) -> None:
    of = "copying_mamba" if "mamba" in name else "generalisation_hard_alibi"
    assert differences(recipe(name), recipe(f"{name.rsplit('/', 1)[0]}/{of}.yaml")) == {"pattern"}


EXTRAPOLATION = {
    "no_dropout": {"model.embedding_dropout"},
    "width_init": {"model.init"},
    "decay_matrices": {"train.decay_vectors"},
    "fresh_examples": {"task"},
    "twice_as_long": {"train.steps", "train.warmup_steps"},
    "early_stop": {"train.stop_at"},
    "absent_keys": {"task"},
    "width_and_examples": {"model.init", "task"},
    "best_at_40": {"train.eval_every", "train.keep_best", "train.best_length"},
}


def test_extrapolation_recipes_change_what_they_name() -> None:
    names = {path.stem for path in (FOLDER / "h3/extrapolation").glob("*.yaml")}
    assert names == EXTRAPOLATION.keys()
    base = recipe("h3/paper/associative_recall_h3.yaml")
    for name, changed in EXTRAPOLATION.items():
        assert differences(recipe(f"h3/extrapolation/{name}.yaml"), base) == changed


def test_recipes_of_table_2_differ_in_the_layers_alone() -> None:
    layers = {"pattern", "model.max_len"}
    for task in ("associative_recall", "induction_head"):
        base = recipe(f"h3/paper/{task}_h3.yaml")
        for model in ("s4d", "gss", "attention"):
            found = differences(recipe(f"h3/paper/{task}_{model}.yaml"), base)
            assert {name for name in found if not name.startswith("model.layers.")} <= layers
    assert recipe("h3/paper/induction_head_s4d.yaml")["pattern"] == "s4d(n_ssm=1, init=inv)*2"


@pytest.mark.parametrize(
    "name",
    [
        path.relative_to(FOLDER).as_posix()
        for folder in ("staircase/paper", "repeat_after_me/paper", "h3/paper", "block_state/paper")
        for path in sorted((FOLDER / folder).glob("*.yaml"))
    ],
)
def test_recipes_of_the_papers_name_their_place_and_their_dropout(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    header = "".join(line for line in text.splitlines() if line.startswith("#"))
    assert re.search(r"\b(tables?|figures?) \d|perplexity table", header)
    assert "et al." in header
    assert "dropout" in text or "repeat_after_me" in name
