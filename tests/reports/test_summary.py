import itertools
import math

import pytest

from stateline.reports.format import DASH
from tests.reports.typed import (
    cost_table,
    costs_concluded,
    headline,
    length_table,
    main_table,
    run_table,
    unfinished,
)

MODEL = "h3*2"


def cells(table, heading, group=None):
    """The cells of one column, by model."""
    (column,) = [
        column
        for column in table.columns
        if column.heading.replace("\N{NO-BREAK SPACE}", " ") == heading
        and group in (None, column.group)
    ]
    return dict(zip(table.models, column.cells, strict=True))


def copying(make, *ends, beyond=0.5, **changes):
    """One model, one run of copying per score at the training length."""
    task = make.task(**changes)
    runs = [
        make.run(MODEL, task, {"10": end, "20": beyond, "40": beyond}, seed=seed)
        for seed, end in enumerate(ends)
    ]
    return make.results(tasks=[task], runs=runs, models=[MODEL])


def test_a_model_that_misses_the_training_length_is_not_scored_beyond_it(make):
    results = copying(make, 0.94)
    table = length_table(results, results["tasks"][0])
    assert cells(table, "at 10 (trained)")[MODEL].text == "0.940"
    assert cells(table, "at 20")[MODEL].text == "not solved"
    assert cells(table, "at 40")[MODEL].text == "not solved"


def test_a_model_that_reaches_the_training_length_is_scored_beyond_it(make):
    table = main_table(copying(make, 0.95))
    assert cells(table, "at 40")[MODEL].text == "0.500"


def test_where_lower_is_better_solved_means_at_most(make):
    changes = {"higher_is_better": False, "solved_at": 0.1}
    assert cells(main_table(copying(make, 0.05, **changes)), "at 40")[MODEL].text == "0.500"
    assert cells(main_table(copying(make, 0.20, **changes)), "at 40")[MODEL].text == "not solved"


def test_the_letters_that_fit_a_state_stand_with_the_costs(make):
    entries = [make.speed(model) for model in make.models]
    for entry, longest in zip(entries, [41_234, None], strict=False):
        entry["longest_copy"] = longest
    column = cells(main_table(make.results(speed=entries)), "letters in the state", "Bound")
    assert [column[model].text for model in make.models] == ["41.2k", "any", DASH]
    assert [column[model].value for model in make.models] == [41_234, math.inf, None]


def test_results_that_do_not_tell_the_letters_have_no_column_of_them(make):
    assert "letters in the state" not in [c.heading for c in main_table(make.results()).columns]


def test_letters_of_models_that_solved_no_task_have_no_column(make):
    results = copying(make, 0.5)
    results["speed"] = [make.speed(MODEL, longest_copy=7)]
    assert "letters in the state" not in [c.heading for c in main_table(results).columns]


def test_the_bits_that_are_needed_stand_with_the_task(make):
    results = copying(make, 1.0, 1.0, 1.0)
    for run, needed in zip(results["runs"], [2, 3, None], strict=True):
        run["capacity"] = {"numbers": 100, "needed": needed, "by_bits": {"0": 0.0}}
    cell = cells(main_table(results), "bits needed")[MODEL]
    assert (cell.text, cell.note) == ("300", f"200{DASH}more")


def test_steps_to_half_and_four_fifths_are_those_of_the_curve(make):
    results = copying(make, 1.0)  # half of it at step 100
    table = run_table(results, results["tasks"][0])
    assert cells(table, "steps to 0.5")[MODEL].text == "100"
    assert cells(table, "steps to 0.8")[MODEL].text == "700"


def test_text_is_scored_at_every_length(make):
    results = make.results()
    table = length_table(results, results["tasks"][1])
    assert cells(table, "at 1024")[MODEL].text == "2.250"
    assert "steps to solve" not in [column.heading for column in table.columns]


def test_several_seeds_show_the_median_and_the_spread(make):
    cell = cells(main_table(copying(make, 0.96, 1.0, 0.99)), "at 10 (trained)")[MODEL]
    assert (cell.text, cell.note) == ("0.990", f"0.960{DASH}1.000")


def test_only_the_seeds_that_solved_are_scored_beyond(make):
    results = copying(make, 0.96, 1.0, 0.2)
    for run, beyond in zip(results["runs"], [0.4, 0.6, 0.1], strict=True):
        run["by_length"]["40"]["string_accuracy"] = beyond
    cell = cells(main_table(results), "at 40")[MODEL]
    assert (cell.text, cell.note) == ("0.500", f"0.400{DASH}0.600, 2/3 solved")


def test_a_model_of_which_most_seeds_fail_is_not_scored_beyond(make):
    table = main_table(copying(make, 1.0, 0.2, 0.3))
    beyond, trained = cells(table, "at 40")[MODEL], cells(table, "at 10 (trained)")[MODEL]
    assert (beyond.text, beyond.note) == ("not solved", "1/3 solved")
    assert (trained.text, trained.note) == ("0.300", f"0.200{DASH}1.000, 1/3 solved")


@pytest.mark.parametrize(
    ("steps", "text", "note"),
    [
        ([700], "700", ""),
        ([500, 1900, 700], "700", ""),
        ([500, None, 700], "700", "2/3 solved"),
        ([500, None, None], "never", "1/3 solved"),
        ([None, None], "never", ""),
        ([None, 1500], "1,500", "1/2 solved"),
    ],
)
def test_steps_to_solve_are_a_median_unless_the_majority_never_solved(make, steps, text, note):
    results = copying(make, *[0.2 if step is None else 1.0 for step in steps])
    for run, step in zip(results["runs"], steps, strict=True):
        run["steps_to_solve"] = step
    cell = cells(main_table(results), "steps to solve")[MODEL]
    assert (cell.text, cell.note) == (text, note)


@pytest.mark.parametrize(
    ("end", "while_training", "text"),
    [(0.962, None, "700"), (0.962, 400, "400"), (0.94, 400, "never")],
)
def test_a_run_has_solved_its_task_if_its_final_score_has(make, end, while_training, text):
    results = copying(make, end)
    results["runs"][0] |= {"steps_to_solve": while_training, "steps": 700}
    table = main_table(results)
    assert cells(table, "steps to solve")[MODEL].text == text
    assert (cells(table, "at 40")[MODEL].text == "not solved") == (text == "never")


def of_ends(make, task, ends, length="256"):
    """Three seeds of each model, a hair apart, at the ends that are given."""
    return [
        make.run(model, task, dict.fromkeys(map(str, task["eval_lengths"]), end + s / 1e4), seed=s)
        for model, end in zip(make.models, ends, strict=False)
        for s in range(3)
    ]


def test_what_is_not_clearly_worse_than_the_best_is_marked(make):
    task = make.text_task()
    table = main_table(make.results(tasks=[task], runs=of_ends(make, task, [2.5, 2.5001, 2.9])))
    assert [c.best for c in cells(table, "at 1024").values()] == [True, True, False]


def test_where_nothing_is_told_apart_nothing_is_marked(make):
    task = make.text_task()
    same = main_table(make.results(tasks=[task], runs=of_ends(make, task, [2.5, 2.5, 2.5])))
    assert not any(c.best for c in cells(same, "at 1024").values())
    one_seed = [run for run in of_ends(make, task, [2.5, 2.9, 2.9]) if run["seed"] == 0]
    alone = main_table(make.results(tasks=[task], runs=one_seed))
    assert not any(c.best for c in cells(alone, "at 1024").values())


def test_a_model_that_never_ran_makes_no_other_the_best(make):
    task = make.text_task()
    runs = [make.run(model, task, {"256": 2.5, "1024": 2.0}) for model in make.models[:2]]
    table = main_table(make.results(tasks=[task], runs=runs))
    assert not any(c.best for c in cells(table, "at 1024").values())


def test_parameters_far_from_the_wanted_ones_are_marked(make):
    results = make.results()
    for run in results["runs"]:
        run["parameters"] = {"h3*2": 126_001, "lstm*2": 126_000}.get(run["model"], 120_000)
    marked = cells(main_table(results), "parameters")
    assert [cell.off for cell in marked.values()] == [False, True, False]


def test_parameters_that_differ_between_tasks_are_a_range(make):
    results = make.results()
    results["runs"][0]["parameters"] = 118_000
    results["runs"][1]["parameters"] = 125_000
    results["runs"].append(results["runs"][0] | {"seed": 1, "parameters": 120_000})
    assert cells(main_table(results), "parameters")[make.models[0]].text == f"118k{DASH}125k"


def test_missing_runs_and_speeds_are_dashes(make):
    results = make.results(finished=False)
    results["runs"], results["speed"] = results["runs"][:1], results["speed"][:1]
    table = main_table(results)
    assert cells(table, "at 40")["lstm*2"].text == DASH
    assert cells(table, "steps to solve")["lstm*2"].text == DASH
    assert cells(table, "state at 1024")["lstm*2"].text == DASH
    assert cells(table, "state at 1024")[make.models[0]].text == "512 KiB"


def test_small_costs_are_best_and_high_speeds_are_best(make):
    slow = make.speed("h3*2", decode_tokens_per_second={"256": 100.0})
    small = make.speed("lstm*2", state_bytes={"256": 4096})
    table = cost_table(make.results(speed=[make.speed(make.models[0]), slow, small]))
    state = cells(table, "at 256", "State size")
    speed = cells(table, "at 256", "Decoding speed")
    assert [c.best for c in state.values()] == [False, False, True]
    assert [c.best for c in speed.values()] == [True, False, True]


def test_costs_that_show_the_same_number_are_marked_together(make):
    """Models whose states were matched differ by some bytes."""
    sizes = zip(make.models, (73_216, 73_220, 131_072), strict=True)
    speed = [make.speed(model, state_bytes={"256": size}) for model, size in sizes]
    state = cells(cost_table(make.results(speed=speed)), "at 256", "State size")
    assert [(c.text, c.best) for c in state.values()] == [
        *[("71.5 KiB", True), ("71.5 KiB", True)],
        ("128 KiB", False),
    ]


def timing(middle, low, high, **changes):
    own = {"phase": "decode", "length": 256, "batch": 1, "rounds": 9}
    return own | {"tokens_per_second": middle, "low": low, "high": high} | changes


def timed(make, *timings, **changes):
    """A speed record per model, each with one timing of decoding."""
    pairs = zip(make.models, timings, strict=True)
    return [make.speed(model, timings=[timing(*own)], **changes) for model, own in pairs]


def test_speeds_whose_spreads_overlap_are_marked_together(make):
    speed = timed(make, (300, 280, 320), (270, 250, 290), (100, 90, 110))
    found = cells(cost_table(make.results(speed=speed)), "at 256", "Decoding speed")
    assert [cell.best for cell in found.values()] == [True, True, False]
    assert found[make.models[0]].note == f"280{DASH}320"


def test_speeds_of_a_busy_machine_are_not_shown(make):
    speed = timed(make, (300, 290, 310), (200, 190, 210), (100, 90, 110), busy=0.4)
    results = make.results(speed=speed)
    assert "Decoding speed" not in {column.group for column in cost_table(results).columns}
    assert costs_concluded(results)[-1] == "Other programs ran: nothing is claimed about speeds."


def test_the_batches_of_a_phase_have_columns_of_their_own_where_they_share_a_length(make):
    both = [timing(300, 290, 310), timing(9000, 8900, 9100, batch=64)]
    speed = [make.speed(model, timings=both) for model in make.models]
    groups = {column.group for column in cost_table(make.results(speed=speed)).columns}
    assert {"Decoding speed, batch 1", "Decoding speed, batch 64"} <= groups
    apart = [timing(300, 290, 310), timing(9000, 8900, 9100, batch=64, length=1024)]
    speed = [make.speed(model, timings=apart) for model in make.models]
    groups = {column.group for column in cost_table(make.results(speed=speed)).columns}
    assert "Decoding speed" in groups


def test_what_was_skipped_is_a_dash(make):
    left_out = timing(None, None, None, skipped="too slow")
    speed = [make.speed(model, timings=[timing(300, 290, 310)]) for model in make.models]
    speed[1]["timings"] = [left_out]
    found = cells(cost_table(make.results(speed=speed)), "at 256", "Decoding speed")
    assert found["h3*2"].text == DASH


def test_tasks_with_the_same_title_are_told_apart_by_their_spec(make):
    tasks = [make.task(), make.task(spec="copying(max_len=20)")]
    groups = {column.group for column in main_table(make.results(tasks=tasks)).columns}
    assert {"copying(max_len=10)", "copying(max_len=20)"} <= groups


def test_run_table_tells_how_long_each_model_trained(make):
    results = copying(make, 1.0, 0.2, 1.0)
    table = run_table(results, results["tasks"][0])
    assert cells(table, "seeds")[MODEL].text == "3"
    assert cells(table, "steps trained")[MODEL].text == "700"


def test_a_score_that_is_not_a_number_is_never_the_best(make):
    task = make.text_task()
    runs = of_ends(make, task, [2.0, 2.4, 2.9])
    runs[0]["by_length"]["1024"]["bits_per_byte"] = None
    table = main_table(make.results(tasks=[task], runs=runs))
    assert [c.best for c in cells(table, "at 1024").values()] == [False, True, False]


@pytest.mark.parametrize("seeds", [*itertools.permutations([2.5, None, 2.4])])
def test_a_seed_that_diverged_is_left_out_of_the_median_and_told(make, seeds):
    task = make.text_task()
    runs = [make.run(MODEL, task, {"256": 2.5, "1024": end}) for end in seeds]
    cell = cells(main_table(make.results(tasks=[task], runs=runs, models=[MODEL])), "at 1024")[
        MODEL
    ]
    assert (cell.text, cell.note) == ("2.450", f"2.400{DASH}2.500, 1/3 diverged")


def test_a_model_whose_seeds_all_diverged_is_said_to_have(make):
    results = make.results()
    results["runs"][0]["by_length"]["10"] = {"string_accuracy": None}
    (cell, *_) = main_table(results).columns[1].cells
    assert (cell.text, cell.value, cell.is_empty) == ("diverged", None, True)


def test_scores_without_a_spread_have_no_note(make):
    assert cells(main_table(copying(make, 1.0, 1.0)), "at 40")[MODEL].note == ""


def test_a_sole_run_that_has_not_finished_says_so(make):
    results = make.results(finished=False, tasks=[make.task()], models=[MODEL], runs=[], speed=[])
    assert unfinished(results) == "This run has not finished."


def test_headline_says_what_was_compared(make):
    assert headline(make.results()) == (
        "3 models matched in parameters, trained with the same settings and 1 seed each "
        "on 2 tasks: Copying and Text."
    )


def test_headline_says_whether_all_models_have_the_same_number_of_seeds(make):
    task, models, scores = make.task(), ["h3*2", "lstm*2"], {"10": 0.5, "20": 0.1, "40": 0.0}
    for second, said in ((2, "and 2 seeds each"), (1, "and up to 2 seeds each")):
        seeds = zip(models, (2, second), strict=True)
        runs = [make.run(m, task, scores, seed=n) for m, k in seeds for n in range(k)]
        assert said in headline(make.results(tasks=[task], models=models, runs=runs, speed=[]))


def test_headline_says_at_which_length_states_match(make):
    """A state that grows is larger at other lengths."""
    for length, said in ((None, "the training length"), (2000, "2,000 tokens")):
        protocol = {"name": "quick", "matched_by": "state", "match_length": length}
        assert headline(make.results() | {"protocol": protocol}).startswith(
            f"3 models matched in state bytes at {said}, trained with"
        )


def test_an_unfinished_comparison_says_how_far_it_came(make):
    results = make.results(finished=False)
    results["runs"] = results["runs"][:4]
    assert unfinished(results) == (
        "This comparison has not finished: it has 4 runs, for 4 of 6 pairs of a model and a task."
    )
    assert unfinished(make.results()) == ""


def test_a_wide_table_is_split_where_a_group_begins(make):
    table = main_table(make.results())
    parts = table.split(6)
    assert [column for part in parts for column in part.columns] == list(table.columns)
    assert len(parts) > 1
    for part, following in itertools.pairwise(parts):
        assert part.columns[-1].group != following.columns[0].group
        assert len(part.columns) <= 6
    assert table.split(99) == [table]
