from pathlib import Path

import pytest

from stateline.errors import InputError
from stateline.reports import folder_names
from stateline.reports.format import DASH
from stateline.reports.records import runs_of
from stateline.reports.sentences import headline, unfinished
from tests.reports.typed import merge, page_of

SCORES = {"10": 1.0, "20": 0.9, "40": 0.5}


def one(make, model="h3*2", *, task=None, d_model=64, seed=0, **changes):
    """A training run: one model, one task, one seed."""
    task = task or make.task()
    training = {"steps": 1000, "lr": 0.001, "seed": seed}
    scores = {str(length): 0.96 for length in task["eval_lengths"]}
    run = make.run(model, task, scores, d_model=d_model, seed=seed, training=training)
    return make.results(tasks=[task], models=[model], runs=[run | changes], speed=[])


def test_different_models_on_one_task_stand_side_by_side(make):
    both = merge({"a": one(make, "h3*2"), "b": one(make, "lstm*2")})
    assert both.models == ["h3*2", "lstm*2"]
    (task,) = both.tasks
    assert [len(runs_of(both, model, task)) for model in both.models] == [1, 1]


def test_a_task_is_the_same_however_its_keywords_are_spelled(make):
    a = one(make, task=make.task(spec="copying(max_len=10,batch_size=2)"))
    b = one(make, "lstm", task=make.task(spec="copying(max_len=10, batch_size=2)"))
    assert len(merge({"a": a, "b": b}).tasks) == 1


def test_a_task_on_other_data_is_another_task_and_says_so(make):
    a = one(make, task=make.text_task(data={"sha256": "aaaaaaaaaa"}))
    b = one(make, "lstm", task=make.text_task(data={"sha256": "bbbbbbbbbb"}))
    both = merge({"a": a, "b": b})
    specs = ["text(path=books) · data aaaaaaaa", "text(path=books) · data bbbbbbbb"]
    assert [task.spec for task in both.tasks] == specs
    assert [run.task for run in both.runs] == specs


@pytest.mark.parametrize(
    "changes",
    [
        {"metric": "accuracy"},
        {"solved_at": 0.5},
        {"solved_at": None},
        {"higher_is_better": False},
        {"train_length": 20},
        {"eval_lengths": [10, 20, 80]},
    ],
)
def test_a_task_that_was_scored_otherwise_is_refused(make, changes):
    other = make.results(tasks=[make.task(**changes)], runs=[], speed=[])
    (field,) = changes
    with pytest.raises(InputError, match=f"scored alike in all runs, got {field} .* in b and"):
        merge({"a": one(make), "b": other})


def test_models_of_one_pattern_are_told_apart_by_their_width(make):
    both = merge({"a": one(make), "b": one(make, d_model=128)})
    assert both.models == ["h3*2 · d_model 64", "h3*2 · d_model 128"]
    assert [run.model for run in both.runs] == both.models


def test_models_of_one_width_are_told_apart_by_their_folder(make):
    longer = one(make, training={"steps": 2000, "lr": 0.001, "seed": 0})
    three = merge({"a": one(make), "b": one(make, d_model=128), "c": longer})
    assert three.models == ["h3*2 · a", "h3*2 · d_model 128", "h3*2 · c"]


def test_a_width_that_depends_on_the_task_is_a_range(make):
    a = one(make)
    a["tasks"].append(make.text_task())
    a["runs"].append(make.run("h3*2", a["tasks"][1], {"256": 2.5, "1024": 2.0}, d_model=80))
    both = merge({"a": a, "b": one(make)})
    assert both.models == [f"h3*2 · d_model 64{DASH}80", "h3*2 · d_model 64"]


def test_models_without_a_run_are_told_apart_by_their_folder(make):
    empty = make.results(tasks=[make.task()], models=["h3*2"], runs=[], speed=[])
    assert merge({"a": one(make), "b": empty}).models == ["h3*2 · d_model 64", "h3*2 · b"]


def test_runs_that_differ_only_in_the_seed_are_one_model(make):
    three = {f"s{seed}": one(make, seed=seed, seconds=3.0 + seed) for seed in range(3)}
    both = merge(three)
    assert both.models == ["h3*2"]
    assert [run.seed for run in both.runs] == [0, 1, 2]
    assert headline(both) == "1 model trained with 3 seeds on 1 task: Copying."


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": 100},
        {"training": {"steps": 1000, "lr": 0.002, "seed": 1}},
        {"parameters_wanted": 100},
    ],
)
def test_runs_that_differ_in_more_than_the_seed_stay_apart(make, changes):
    both = merge({"a": one(make), "b": one(make, seed=1, **changes)})
    assert both.models == ["h3*2 · a", "h3*2 · b"]


def test_a_model_of_several_folders_is_named_after_the_first(make):
    same = {f"s{seed}": one(make, seed=seed) for seed in range(2)}
    both = merge(same | {"other": one(make, parameters=100)})
    assert both.models == ["h3*2 · s0 and 1 more", "h3*2 · other"]


def test_a_model_of_several_seeds_has_the_speed_of_the_first(make):
    timed = {
        s: one(make, seed=s) | {"speed": [make.speed("h3*2", state_bytes={"256": s})]}
        for s in (0, 1)
    }
    both = merge({f"s{seed}": results for seed, results in timed.items()})
    assert [entry.state_bytes[256] for entry in both.speed] == [0]


@pytest.mark.parametrize("first", [0, 1])
def test_what_protocols_tell_of_tasks_and_seeds_is_joined(make, first):
    protocols = [
        {"name": "quick", "seeds": {"a": [0, 1]}, "sizes": [100], "looks": 4},
        {"name": "quick", "seeds": {"b": [0]}, "sizes": [200, 100]},
    ]
    both = [one(make) | {"protocol": own} for own in (protocols[first], protocols[1 - first])]
    joined = merge({"a": both[0], "b": both[1]}).protocol
    assert (joined.seeds, joined.sizes, joined.looks) == ({"a": [0, 1], "b": [0]}, [100, 200], 4)


@pytest.mark.parametrize(
    "other", [None, {"name": "sweep"}, {"name": "quick", "matched_by": "flops"}]
)
def test_results_of_different_protocols_have_none_in_common(make, other):
    both = [one(make) | {"protocol": own} for own in ({"name": "quick"}, other)]
    assert merge({"a": both[0], "b": both[1]}).protocol is None


def test_the_seeds_of_a_comparison_stay_together_beside_another(make):
    task = make.task()
    runs = [make.run("h3*2", task, SCORES, seed=seed) for seed in range(3)]
    seeds = make.results(tasks=[task], models=["h3*2"], runs=runs, speed=[])
    both = merge({"a": seeds, "b": one(make, d_model=128)})
    assert [len(runs_of(both, model, both.tasks[0])) for model in both.models] == [3, 1]


def test_speeds_go_with_their_model(make):
    a = one(make) | {"speed": [make.speed("h3*2", state_bytes={"256": 1})]}
    b = one(make, d_model=128) | {"speed": [make.speed("h3*2", state_bytes={"256": 2})]}
    both = merge({"a": a, "b": b})
    told = [(entry.model, entry.state_bytes[256]) for entry in both.speed]
    assert told == [("h3*2 · d_model 64", 1), ("h3*2 · d_model 128", 2)]


def test_the_given_results_are_left_as_they_were(make):
    a, b = one(make), one(make, seed=1)
    merge({"a": a, "b": b})
    assert (a, b) == (one(make), one(make, seed=1))


def test_the_page_tells_the_command_and_the_environment_of_every_run(make):
    a = one(make) | {"command": "stateline train a", "environment": {"cpu": "First"}}
    b = one(make, "lstm") | {"command": "stateline train b", "environment": {"cpu": "Second"}}
    text = page_of(merge({"a": a, "b": b}))
    for told in ("stateline train a", "stateline train b", "<dd>First</dd>", "<dd>Second</dd>"):
        assert told in text
    assert text.count("in <code>b</code>") == 2


def test_what_has_not_finished_is_named(make):
    both = merge({"a": one(make), "b": one(make, "lstm") | {"finished": False}})
    assert unfinished(both) == "Not finished yet: b. There are 2 runs in all."


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "2 models matched in parameters, trained with the same settings and"),
        (
            {"parameters_wanted": 130_000},
            "2 models of different sizes (120k parameters), trained with the same settings and",
        ),
        (
            {"training": {"lr": 1}},
            "2 models matched in parameters, trained with different settings and",
        ),
    ],
)
def test_only_what_was_alike_is_called_alike(make, changes, said):
    both = merge({"a": one(make), "b": one(make, "lstm", seed=1, **changes)})
    assert headline(both) == f"{said} 1 seed each on 1 task: Copying."


def test_folders_are_named_by_as_much_of_their_path_as_it_takes(tmp_path):
    names = ["x/run", "y/run", "y/other"]
    assert folder_names([tmp_path / name for name in names]) == names
    assert folder_names([tmp_path / "x", tmp_path / "y"]) == ["x", "y"]


def test_a_folder_given_twice_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"each folder must be given once, got .*/../x twice"):
        folder_names([Path(f"{tmp_path}/y/../x"), tmp_path / "x"])
