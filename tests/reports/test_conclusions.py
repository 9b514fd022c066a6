"""What a report concludes from planted results: no more than their spread allows."""

import re
from pathlib import Path

import pytest

from stateline.reports import sentences
from stateline.reports.answers import answers
from stateline.reports.conclusions import conclusions
from stateline.runs.folder import read_results
from tests.reports.typed import (
    caution,
    concluded,
    costs_concluded,
    headline,
    merge,
    page_of,
    printed,
    typed,
)

MODELS = ["attention(position=rope)*2", "h3*2", "lstm*2"]


def seeds(make, task, scores, **changes):
    """The runs of models whose scores per seed are given, at all lengths."""
    runs = []
    for model, own in scores.items():
        for seed, score in enumerate(own):
            lengths = dict.fromkeys(map(str, task["eval_lengths"]), 0.0 if score is None else score)
            run = make.run(model, task, lengths, seed=seed, **changes)
            if score is None:
                run["by_length"] = {length: {task["metric"]: None} for length in lengths}
            runs.append(run)
    return runs


def planted(make, scores, task=None, **changes):
    """Results of models whose scores per seed are given."""
    task = task or make.text_task(eval_lengths=[256])
    runs = seeds(make, task, scores)
    return make.results(tasks=[task], models=list(scores), runs=runs, speed=[], **changes), task


def test_a_clear_winner_is_named_with_its_spread(make):
    scores = {"h3*2": [2.0, 2.01, 2.02], "lstm*2": [2.8, 2.81, 2.82]}
    assert concluded(*planted(make, scores)) == [
        "At length 256 (3 seeds), bits per byte of “h3*2” 2.010 (2.000 to 2.020) and “lstm*2” "
        "2.810 (2.800 to 2.820).",
        "“h3*2” is clearly better than “lstm*2”.",
    ]


def test_the_sentences_name_every_pair_as_the_verdict_has_it(make):
    """One seed of a fifth model once removed the claims about the others."""
    scores = {
        "h3+attention": [0.976, 0.927, 0.968],
        "attention": [0.675, 0.629, 0.692],
        "s4d": [0.285, 0.204, 0.222],
        "lstm": [0.220, 0.244, 0.274],
        "h3": [0.928, 0.312, 0.320],
    }
    task = make.task(problems=1024, eval_lengths=[10])
    results, _ = planted(make, scores, task)
    (answer,) = answers(typed(results)).every
    assert len(answer.verdict.better) == 5
    sentences = concluded(results, task)
    (same,) = (said for said in sentences if said.startswith("Not told apart"))
    assert "“attention” is clearly better than “lstm” and “s4d”." in sentences
    for pair in answer.verdict.pairs:
        named = f"“{pair.better}” and “{pair.worse}”" in same
        assert named != pair.told


def test_equal_models_are_not_told_apart(make):
    scores = {"h3*2": [2.0, 2.3, 2.6], "same": [2.1, 2.25, 2.7], "lstm*2": [9.0, 9.1, 9.2]}
    _, *told, same = concluded(*planted(make, scores))
    assert told == [
        "“h3*2” is clearly better than “lstm*2”.",
        "“same” is clearly better than “lstm*2”.",
    ]
    assert same == "Not told apart: “h3*2” and “same”."


def test_the_higher_score_wins_where_higher_is_better(make):
    task = make.task(eval_lengths=[10], problems=1024)
    scores = {"h3*2": [0.2, 0.21, 0.22], "lstm*2": [0.97, 0.98, 0.99]}
    solved, own, best = concluded(*planted(make, scores, task))
    assert solved == "Solved by “lstm*2” with every seed."
    assert own.startswith("At length 10 (3 seeds), string accuracy of “lstm*2” 0.980")
    assert best == "“lstm*2” is clearly better than “h3*2”."


def test_without_a_solution_none_is_scored_beyond_the_training_length(make):
    scores = {"h3*2": [0.2, 0.21, 0.22], "lstm*2": [0.5, 0.51, 0.52]}
    said = concluded(*planted(make, scores, make.task()))
    assert said[0] == "Not solved (0.95 string accuracy): the best, “lstm*2”, has 0.510."
    assert not any("40" in sentence for sentence in said)


def test_a_model_that_few_seeds_solve_is_not_called_unsolved(make):
    said = concluded(*planted(make, {"h3*2": [0.2, 0.21, 0.99]}, make.task()))
    assert said[0] == "Solved by “h3*2” with 1 of 3 seeds."


def test_beyond_the_training_length_only_models_that_solved_it_are_judged(make):
    scores = {"h3*2": [0.2, 0.21, 0.22], "lstm*2": [0.97, 0.98, 0.99]}
    said = concluded(*planted(make, scores, make.task()))
    assert said[-1] == (
        "At length 40 (3 seeds), string accuracy of “lstm*2” 0.980 (0.970 to 0.990)."
    )


def test_one_seed_decides_nothing(make):
    results, task = planted(make, {"h3*2": [2.0], "lstm*2": [9.0]})
    assert concluded(results, task) == []
    assert caution(results) == "One seed decides nothing."


def test_the_quick_protocol_says_once_that_it_decides_nothing(make):
    page = page_of(make.results(protocol={"name": "quick"}))
    assert page.count("One seed and one learning rate decide nothing.") == 1
    assert "decide nothing. Without --protocol quick" in page
    assert "clearly best" not in page


def test_several_seeds_need_no_caution(make):
    results, _ = planted(make, {"h3*2": [2.0, 2.1], "lstm*2": [2.0, 2.1]})
    assert caution(results) == ""
    assert "decide nothing" not in page_of(results)


@pytest.mark.parametrize(("name", "said"), [("sweep", ""), ("quick", sentences.ONE_RATE)])
def test_planned_seeds_are_counted_before_they_have_run(make, name, said):
    protocol = {"name": name, "seeds": {make.task()["spec"]: [0, 1, 2]}}
    begun = make.results(finished=False, protocol=protocol)
    assert caution(begun | {"runs": []}) == said
    assert caution(begun).startswith("One seed")  # so far
    assert caution(make.results(finished=False, runs=[])) == ""


def test_of_a_model_that_diverged_nothing_is_claimed(make):
    scores = {"h3*2": [2.0, 2.01, None], "lstm*2": [2.8, 2.81, 2.82], "s4d": [None, None, None]}
    said = concluded(*planted(make, scores))
    assert said == [
        "At length 256 (3 seeds), bits per byte of “lstm*2” 2.810 (2.800 to 2.820).",
        "At length 256 (3 seeds), nothing is claimed about “h3*2” 2.005 (2.000 to 2.010, 1 of 3 "
        "seeds diverged) and “s4d” (3 of 3 seeds diverged).",
    ]


def test_a_sole_seed_that_diverged_is_said_to(make):
    assert concluded(*planted(make, {"h3*2": [2.0], "lstm*2": [None]})) == [
        "At length 256, nothing is claimed about “lstm*2” (1 of 1 seed diverged)."
    ]


def test_beside_a_model_with_one_seed_none_is_called_the_best(make):
    scores = {"h3*2": [2.0, 2.01, 2.02], "lstm*2": [2.8, 2.81, 2.82], "s4d": [1.5]}
    both, better, single = concluded(*planted(make, scores))
    assert both.startswith("At length 256, bits per byte of “h3*2” 2.010")
    assert better == "“h3*2” is clearly better than “lstm*2”."
    assert single == "At length 256, with one seed, nothing is claimed about “s4d” 1.500."


def test_the_report_of_a_single_run_speaks_of_no_others(make):
    task = make.task(problems=1024, chance=0.0)
    runs = [make.run("h3*2", task, {"10": 0.0, "20": 0.0, "40": 0.0})]
    results = make.results(
        tasks=[task], models=["h3*2"], runs=runs, protocol={"name": "quick", "learning_rates": {}}
    )
    for text in (page_of(results), printed(results)):
        assert "Result" in text
        assert "the model is no better than a guess" in text
        assert "Not solved (0.95 string accuracy)" in text
        said = re.sub("(?s)<(style|script).*?</(style|script)>", "", text)
        others = (
            "Which one|[Nn]o model|no other|told apart|clearly|decide|compared size|[Nn]ext choice"
        )
        assert re.findall(others, said) == []


def test_a_sole_model_is_scored_and_not_ranked(make):
    assert concluded(*planted(make, {"h3*2": [2.0, 2.2]})) == [
        "At length 256 (2 seeds), bits per byte of “h3*2” 2.100 (2.000 to 2.200)."
    ]


def test_a_task_without_runs_says_so(make):
    task = make.text_task()
    assert concluded(make.results(runs=[], speed=[]), task) == [
        "No run on this task has finished yet."
    ]


def test_models_of_different_sizes_are_named_so(make):
    task = make.text_task(eval_lengths=[256])
    small = seeds(make, task, {"h3*2": [2.0, 2.01]}, parameters=5_500, parameters_wanted=5_500)
    large = seeds(make, task, {"lstm*2": [1.0, 1.01]}, parameters=43_900, parameters_wanted=43_900)
    results = make.results(tasks=[task], models=["h3*2", "lstm*2"], runs=small + large, speed=[])
    assert "2 models of different sizes (5.5k to 43.9k parameters)" in headline(results)
    assert "matched" not in page_of(results)
    assert concluded(results, task)[-1] == (
        "These models have different sizes (5.5k to 43.9k parameters): this says nothing about "
        "architectures of equal size."
    )


def test_models_in_several_sizes_are_judged_within_each(make):
    results = read_results(Path("tests/runs/sweep"))
    ((_, said), _) = conclusions(answers(results))
    assert [text.split(",")[1] for text in said if text.startswith("At length")][:3] == [
        " size 10k (3 seeds)",
        " size 30k (3 seeds)",
        " size 100k (3 seeds)",
    ]
    assert sum("is clearly better than" in sentence for sentence in said) >= 3


def test_merged_results_are_judged_together(make):
    one, _ = planted(make, {"h3*2": [2.0, 2.01, 2.02]})
    other, _ = planted(make, {"lstm*2": [2.8, 2.81, 2.82]})
    both = merge({"a": one, "b": other})
    ((_, said),) = conclusions(answers(both))
    assert said[1] == "“h3*2” is clearly better than “lstm*2”."


def test_the_protocol_and_the_trials_of_merged_results_stay(make):
    def tried(model, last):
        trial = {"lr": 0.1, "weight_decay": 0.1, "seed": 1000, "steps": 1, "steps_planned": 2}
        trial |= {"validation": 0.5, "stopped": "paused", "chosen": True, "seconds": 1.0}
        task = make.text_task()
        protocol = {"name": "sweep", "learning_rates": {task["spec"]: [0.1]}, "trial_seed": 1000}
        results, _ = planted(make, {model: [2.0, last]}, protocol=protocol)
        return results | {"trials": [trial | {"model": model, "task": results["tasks"][0]["spec"]}]}

    both = merge({"a": tried("h3*2", 2.1), "b": tried("h3*2", 2.2)})
    assert [trial.model for trial in both.trials] == ["h3*2 · a", "h3*2 · b"]
    assert both.protocol is not None
    assert both.protocol.name == "sweep"
    quick, _ = planted(make, {"lstm*2": [2.0]}, protocol={"name": "quick"})
    assert merge({"a": tried("h3*2", 2.1), "b": quick}).protocol is None


def test_an_older_file_without_the_new_fields_is_concluded_from(make):
    results = make.results()
    assert not {"protocol", "trials"} & results.keys()
    assert "One seed decides nothing." in page_of(results)
    assert costs_concluded(results)[1].startswith(
        "Decoding speed at 1,024 tokens, measured once, so differences may be noise: "
    )


def speeds(make, *spreads):
    pairs = zip(MODELS, spreads, strict=True)
    own = {"phase": "decode", "length": 256, "batch": 1, "rounds": 9}
    return [
        make.speed(
            model,
            timings=[own | {"low": low, "tokens_per_second": middle, "high": high}],
        )
        for model, (low, middle, high) in pairs
    ]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((240, 250, 260), "“attention(position=rope)*2” is fastest, "),
        ((280, 285, 295), "no clear fastest among “attention(position=rope)*2” 300 tokens/s "),
    ],
)
def test_speeds_are_told_apart_only_where_their_spreads_do_not_overlap(make, second, said):
    results = make.results(speed=speeds(make, (290, 300, 310), second, (90, 100, 110)))
    (_, decoding) = costs_concluded(results)
    assert decoding.startswith(f"Decoding speed at 256 tokens: {said}")
