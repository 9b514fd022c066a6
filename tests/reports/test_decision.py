"""Which model a report decides on, at which cost, and how surely."""

import math
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from stateline.errors import InputError
from stateline.reports import decision, read_results
from stateline.reports.answers import above_chance, answers
from stateline.reports.budgets import Budget, read_budget
from stateline.reports.conclusions import pair_rows
from stateline.reports.decision import Decision
from stateline.reports.outlook import outlook
from stateline.runs.results import Results
from tests.reports.typed import page_of, printed, typed, with_task

CURVE = {"step": 1, "loss": 1.0, "metric": 0.1}

STEPS = range(500, 1001, 50)


@pytest.fixture(scope="module")
def gallery() -> Results:
    return read_results("docs/gallery/hybrids")


def decided(results, *budgets: str) -> dict[tuple[str, str], Decision]:
    found = decision.decisions(answers(typed(results), [read_budget(text) for text in budgets]))
    return {(row.task, row.length.partition(" ")[0]): row for row in found}


def runs_at(make, task, scores):
    """A run per seed of models whose scores at the training length are given."""
    lengths = [str(length) for length in task["eval_lengths"]]
    return [
        make.run(model, task, dict.fromkeys(lengths, value), seed=seed)
        for model, own in scores.items()
        for seed, value in enumerate(own)
    ]


def test_five_questions_are_answered_by_the_gallery(gallery):
    """Each answer is that of six seeds; the last, that nothing is within the budget."""
    best = decided(gallery)
    assert best["Word problem", "64"].best == "lstm"
    assert best["Associative recall", "80"].best == "lstm+attention"
    assert best["Text", "2,048"].best == "lstm+attention"
    small = decided(gallery, "state@65536<=64KiB")
    assert small["Text", "2,048"].best == "lstm"
    assert small["Text", "2,048"].sure == "clearly best within the budget (6 seeds)"
    assert small["Text", "2,048"].following.startswith(
        "beyond the budget: “lstm+attention” 2.203 (0.031 better), 1.5 MiB at 4,096 tokens, 24 MiB"
    )
    assert small["Copying", "8"].best == "h3"
    assert small["Associative recall", "80"].best == "lstm"
    alone = decided(gallery, "state<=1KiB")["Associative recall", "80"]
    assert (alone.best, alone.sure) == ("lstm", "no other is within the budget (5 seeds)")
    none = decided(gallery, "state<=100")
    assert {row.sure for row in none.values()} == {"no model is within the budget"}
    assert {row.best for row in none.values()} == {""}
    unknown = decided(gallery, "state@5000<=64KiB")
    (said,) = {row.sure for row in unknown.values()}
    assert said.startswith("no model was measured for state@5000<=64KiB, only at 256, ")


QUESTIONS = re.findall(
    r"^\| Which [^|]*\| ([^|]*) \| ([^|]*) at (\d\d?|2,048) \| ([^|]*) \|$",
    Path("docs/commands/report.md").read_text().replace("| |", "|  |"),
    re.MULTILINE,
)
"""Of the table on the page of the command: the budget, the task, the length and the answer."""


def test_the_questions_of_the_documentation_have_its_answers(gallery):
    assert len(QUESTIONS) == 5
    for budget, task, length, answer in QUESTIONS:
        budgets = [text for text in [budget.strip().strip("`")] if text]
        row = decided(gallery, *budgets)[task, length]
        assert row.best == answer, (budget, task)


def test_the_questions_at_4096_tokens_have_the_answers_of_the_documentation():
    results = read_results("docs/gallery/recall_4k")
    page = Path("docs/commands/report.md").read_text()
    for budget in ("", "state@4096<=64KiB"):
        best = decided(results, *filter(None, [budget]))["Associative recall", "4,096"].best
        asked = f"`{budget}`" if budget else ""
        assert f" | {asked} | Associative recall at 4096 | {best} |".replace("|  |", "| |") in page


def test_the_models_of_the_gallery_have_equal_updates(gallery):
    for task in gallery.tasks:
        (steps,) = {run.steps for run in gallery.runs if run.task == task.spec}
        assert steps >= 300


def test_whether_two_models_differ_and_what_it_took_stands_in_the_table_of_pairs(gallery):
    recall = answers(gallery).every[0]
    (row,) = [own for own in pair_rows(recall) if own.pair == "“h3” against “s4d”"]
    assert row.difference == "+0.118"
    assert re.fullmatch(r"told apart after 6 seeds each, [\d.]+ min of training", row.verdict)


def test_the_sizes_of_the_gallery_are_equal(gallery):
    for task in ("associative_recall", "copying", "word_problem", "text"):
        sizes = [run.parameters for run in gallery.runs if run.task.startswith(task)]
        assert max(sizes) <= 1.1 * min(sizes)


def test_the_twelve_mixers_have_equal_sizes_and_seeds():
    results = read_results("docs/gallery/mixers")
    assert len(results.models) == 12
    for task in results.tasks:
        runs = [run for run in results.runs if run.task == task.spec]
        assert {abs(run.parameters / run.parameters_wanted - 1) < 0.05 for run in runs} == {True}
        seeds = {model: {r.seed for r in runs if r.model == model} for model in results.models}
        assert list(seeds.values()) == 12 * [{0, 1, 2}]


def test_three_seeds_and_the_three_others_give_the_same_answers(gallery):
    for seeds in ({0, 1, 2}, {3, 4, 5}):
        some = replace(gallery, runs=[run for run in gallery.runs if run.seed in seeds])
        assert decided(some)["Word problem", "64"].best == "lstm"
        assert decided(some)["Associative recall", "80"].best == "lstm+attention"
        small = decided(some, "state<=64KiB")
        assert small["Associative recall", "80"].best == "lstm"
        assert small["Copying", "8"].best == "h3"


def test_the_longest_length_is_the_last_at_which_a_model_is_above_chance(gallery):
    assert [length for task, length in decided(gallery) if task == "Copying"] == ["8", "16"]


def test_what_is_best_within_a_budget_may_still_be_a_guess(gallery):
    row = decided(gallery, "state<=64KiB")["Copying", "16"]
    assert row.best == ""
    assert row.sure == (
        "no model within the budget is better than a guess: “h3” has 0.000, a guess 0.000"
    )
    assert row.following.startswith("beyond the budget: “attention” 0.121 (0.121 better), 4 of 6")


def test_of_equal_scores_the_smallest_state_is_taken(make):
    task = make.task(problems=1024, eval_lengths=[10])
    scores = {"h3*2": [1.0, 0.99, 1.0], "lstm*2": [0.995, 0.995, 0.99]}
    costs = [make.speed("h3*2"), make.speed("lstm*2", state_bytes={"256": 900, "1024": 900})]
    results = make.results(tasks=[task], models=[*scores], runs=runs_at(make, task, scores))
    (row,) = decided(results | {"speed": costs}).values()
    assert (row.best, row.costs) == ("lstm*2", "900 B to 1,024 tokens, 310 tok/s at 256")
    assert row.following.startswith("“h3*2” 1.000 (0.005 better), ")
    assert row.sure == "not told apart from “h3*2” (3 seeds)"


def test_of_losses_the_lowest_is_best(make):
    task = make.text_task(eval_lengths=[256])
    scores = {"h3*2": [2.5, 2.6, 2.4], "lstm*2": [2.0, 2.05, 1.95]}
    results = make.results(tasks=[task], models=[*scores], runs=runs_at(make, task, scores))
    (row,) = decided(results).values()
    assert (row.best, row.sure) == ("lstm*2", "clearly best (3 seeds)")
    assert row.following.startswith("“h3*2” 2.500 (0.500 worse)")


@pytest.mark.parametrize(
    ("other", "said"), [(0.9918, "0.992 (equal)"), (0.9914, "0.991 (0.001 worse)")]
)
def test_a_next_choice_is_said_to_be_equal_if_it_shows_the_same_score(make, other, said):
    task = make.task(problems=1024, eval_lengths=[10])
    scores = {"h3*2": [0.9916], "lstm*2": [other]}
    speed = [make.speed(m, state_bytes={"256": n}) for n, m in enumerate(scores, 1)]
    results = make.results(
        tasks=[task], models=[*scores], runs=runs_at(make, task, scores), speed=speed
    )
    (row,) = decided(results).values()
    assert (row.best, row.score) == ("h3*2", "0.992 string accuracy")
    assert row.following.startswith(f"“lstm*2” {said}, ")


def test_losses_are_equal_within_a_hundredth_of_the_best(make):
    task = make.text_task(eval_lengths=[256])
    scores = {"h3*2": [2.4, 2.5, 2.6], "lstm*2": [2.42, 2.52, 2.62]}
    costs = [make.speed("h3*2"), make.speed("lstm*2", state_bytes={"256": 900, "1024": 900})]
    results = make.results(tasks=[task], models=[*scores], runs=runs_at(make, task, scores))
    (row,) = decided(results | {"speed": costs}).values()
    assert row.best == "lstm*2"
    assert row.following.startswith("“h3*2” 2.500 (0.020 better), ")


def test_of_close_scores_the_clearly_better_is_taken_at_any_cost(make):
    task = make.task(problems=10**6, eval_lengths=[10])
    scores = {"h3*2": [0.990, 0.991, 0.990], "lstm*2": [0.985, 0.986, 0.985]}
    costs = [make.speed("h3*2"), make.speed("lstm*2", state_bytes={"256": 900, "1024": 900})]
    results = make.results(tasks=[task], models=[*scores], runs=runs_at(make, task, scores))
    (row,) = decided(results | {"speed": costs}).values()
    assert (row.best, row.sure) == ("h3*2", "clearly best (3 seeds)")


def test_a_worse_model_beyond_the_budget_is_no_next_choice(make):
    task = make.task(problems=1024, eval_lengths=[10])
    attention, h3, lstm = make.models
    scores = {h3: [0.99] * 3, attention: [0.9] * 3, lstm: [0.8] * 3}
    sizes = {h3: 1000, attention: 10**6, lstm: 400}
    costs = [make.speed(m, state_bytes={"256": n, "1024": n}) for m, n in sizes.items()]
    results = make.results(tasks=[task], runs=runs_at(make, task, scores), speed=costs)
    (row,) = decided(results, "state<=64KiB").values()
    assert row.best == h3
    assert row.following.startswith(f"“{lstm}” 0.800")


@pytest.mark.parametrize(
    ("same", "said", "folded"),
    [
        (3, "“a”, “b” and “c”", ""),
        (4, "4 of the 5 others", "“a”, “b”, “c” and “d”"),
        (5, "any of the 5 others", ""),
    ],
)
def test_many_models_that_are_not_told_apart_are_counted(make, same, said, folded):
    """Of six models, five seeds that agree are enough."""
    task = make.task(problems=1024, eval_lengths=[10])
    scores = {name: [0.9 if n < same else 0.2] * 5 for n, name in enumerate("abcde")}
    scores = {"best": [0.905] * 5, **scores}
    results = make.results(tasks=[task], models=[*scores], runs=runs_at(make, task, scores))
    (row,) = decided(results).values()
    assert (row.sure, row.alike) == (f"not told apart from {said} (5 seeds)", folded)
    page = page_of(results)
    assert (f"<details><summary>which</summary>{folded}</details>" in page) == bool(folded)
    assert (f"(5 seeds): {folded}" in printed(results, width=200)) == bool(folded)


@pytest.mark.parametrize(("further", "helps"), [(0, False), (10, True)])
def test_seeds_that_would_help_are_asked_for(make, further, helps):
    """The error rate is shared by all pairs: beside ten models, a difference needs more seeds."""
    task = make.task(eval_lengths=[10])
    scores = {"a": [0.90, 0.91, 0.92], "b": [0.79, 0.80, 0.81]}
    scores |= {f"c{n}": [0.1, 0.3, 0.5] for n in range(further)}
    results = make.results(tasks=[task], models=[*scores], runs=runs_at(make, task, scores))
    (row,) = decided(results).values()
    assert ("(3 seeds; try 6)" in row.sure) == helps
    assert (row.sure == "clearly best (3 seeds)") != helps


def test_seeds_of_two_kinds_ask_for_more(make):
    """All of three seeds solve the task, or none: of 66 pairs, six seeds tell that apart."""
    task = make.task(problems=1024, eval_lengths=[10])
    scores = {"a": [0.99, 0.98, 1.0], "b": [0.57, 0.56, 0.58], "c": [0.99, 0.61, 0.98]}
    scores |= {f"d{n}": [0.99, 0.98, 1.0] for n in range(9)}
    results = make.results(tasks=[task], models=[*scores], runs=runs_at(make, task, scores))
    (row,) = decided(results).values()
    assert row.sure.endswith("any of the 11 others (3 seeds; try 6)")


def test_seeds_that_would_not_help_are_not_asked_for(make):
    task = make.task(eval_lengths=[10])
    scores = {"a": [0.8, 0.9, 1.0], "b": [0.81, 0.89, 0.99]}
    results = make.results(tasks=[task], models=[*scores], runs=runs_at(make, task, scores))
    (row,) = decided(results).values()
    assert row.sure == "not told apart from “b” (3 seeds)"


def test_one_seed_decides_nothing(make):
    assert {row.sure for row in decided(make.results()).values()} == {"one seed: not decided"}
    task = make.task(problems=1024, eval_lengths=[10])
    runs = runs_at(make, task, {"h3*2": [0.9, 0.9, 0.9], "lstm*2": [0.5]})
    (row,) = decided(make.results(tasks=[task], models=["h3*2", "lstm*2"], runs=runs)).values()
    assert (row.best, row.sure) == ("h3*2", "one seed: not decided")
    runs += runs_at(make, task, {"s4d": [0.2, 0.2, 0.2]})
    models = ["h3*2", "lstm*2", "s4d"]
    (row,) = decided(make.results(tasks=[task], models=models, runs=runs)).values()
    assert (row.best, row.sure) == ("h3*2", "not told apart from “lstm*2” (3 seeds)")


def test_a_model_that_diverged_is_no_choice(make):
    task = make.task(problems=1024, eval_lengths=[10])
    runs = runs_at(make, task, {"h3*2": [0.0, 0.0], "lstm*2": [0.9, 0.91]})
    for run in runs[:2]:
        run["by_length"] = {"10": {task["metric"]: None}}
    (row,) = decided(make.results(tasks=[task], models=["h3*2", "lstm*2"], runs=runs)).values()
    assert (row.best, row.following) == ("lstm*2", "")
    assert row.sure == "no other has a score here (2 seeds)"


def test_seeds_that_diverged_are_not_counted_beside_the_score(make):
    task = make.task(problems=1024, eval_lengths=[10])
    runs = runs_at(make, task, {"h3*2": [1.0, 0.0, 1.0], "lstm*2": [0.5, 0.0, 0.5]})
    runs[1]["by_length"] = runs[4]["by_length"] = {"10": {task["metric"]: None}}
    (row,) = decided(make.results(tasks=[task], models=["h3*2", "lstm*2"], runs=runs)).values()
    assert row.score == "1.000 string accuracy, 2 of 3 seeds"
    assert ", 2 of 3 seeds, 128 KiB at 256 tokens, 512 KiB at" in row.following


def test_the_seeds_that_may_be_scored_are_counted(make):
    task = make.task(problems=1024, eval_lengths=[10, 20])
    runs = runs_at(make, task, {"h3*2": [1.0, 0.5, 0.98]})
    rows = decided(make.results(tasks=[task], models=["h3*2"], runs=runs))
    assert rows["Copying", "10"].score.endswith("accuracy")
    assert rows["Copying", "20"].score.endswith(", 2 of 3 seeds")


@pytest.mark.parametrize(
    ("task", "least"),
    [
        ({"problems": 1024, "chance": 0.25}, 0.25 + 4 * (0.25 * 0.75 / 1024) ** 0.5),
        ({"problems": 10**6, "chance": 0.25}, 0.27),
        ({"problems": 1024, "chance": None}, 0.02),
        ({"problems": 0, "chance": 0.25}, 0.0),
        ({"problems": 1024, "higher_is_better": False}, 0.0),
    ],
)
def test_a_score_is_above_chance_by_a_margin(make, task, least):
    _, found = with_task(make.results(tasks=[make.task(**task)]), make.task(**task))
    assert above_chance(found, [least + 1e-6])
    assert least == 0 or not above_chance(found, [least - 1e-6])


def test_a_speed_or_a_state_at_a_length_can_be_limited(make):
    slow = make.speed("lstm*2", decode_tokens_per_second={"256": 90.0, "1024": 80.0})
    results = make.results()
    results["speed"][2] = slow
    results["speed"][0]["state_bytes"] = {"256": 10, "1024": 1e9}

    def within(*budgets: str) -> set[str]:
        limits = [read_budget(text) for text in budgets]
        return {m for m in make.models if all(b.allows(typed(results), m, 300) for b in limits)}

    attention, h3, lstm = make.models
    assert within("decode>=100") == {attention, h3}
    assert within("state<=1MiB") == {h3, lstm}
    assert within("state@256<=64") == {attention}
    assert within("state<=1MiB", "decode >= 0.1k") == {h3}
    assert within("prefill>=1") == set()  # nobody measured it


@pytest.mark.parametrize(
    ("text", "bound"), [("state<=64KiB", 65536), ("decode>=1.5k", 1500), ("flops<=2M", 2e6)]
)
def test_a_budget_is_read(text: str, bound: float) -> None:
    assert read_budget(text) == Budget(text, read_budget(text).cost, None, bound)


@pytest.mark.parametrize("text", ["", "state", "state<64", "size<=3", "state<=1.2.3", "flops<=3x"])
def test_a_malformed_budget_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match="a budget must limit state, flops, decode"):
        read_budget(text)


def test_a_limit_on_the_wrong_side_is_refused() -> None:
    with pytest.raises(InputError, match="a budget of decode needs >=, got 'decode<=5'"):
        read_budget("decode<=5")


def test_models_that_only_guess_are_said_to(make):
    task = make.task(problems=1024, chance=0.25)
    runs = runs_at(make, task, {"h3*2": [0.26, 0.24], "lstm*2": [0.25, 0.27]})
    results = make.results(tasks=[task], models=["h3*2", "lstm*2"], runs=runs)
    assert {(row.best, row.sure) for row in decided(results).values()} == {
        ("", "no model is better than a guess: “lstm*2” has 0.260, a guess 0.250")
    }
    guess, few_points = outlook(*with_task(results, task))
    assert guess.startswith("no model is better than a guess (which has 0.250)")
    assert few_points == "try more steps or other learning rates."
    flat = [CURVE | {"step": n, "metric": 0.25} for n in STEPS]
    results["runs"] = [run | {"curve": flat, "steps": 1000} for run in runs]
    _, told = outlook(*with_task(results, task))
    assert told == "no curve has begun to improve: try more steps or other learning rates."


def test_baselines_that_no_model_beats_at_any_length_are_named(make):
    task = make.text_task(eval_lengths=[256, 1024], baselines={"gzip": 2.3, "xz": 2.2})
    results = make.results(tasks=[task])  # 2.5 at 256, 2.25 at 1024
    assert outlook(*with_task(results, task)) == ["no model is better than xz (2.200)."]
    results["runs"][0]["by_length"]["1024"] = {task["metric"]: 2.1}
    assert outlook(*with_task(results, task)) == []
    results |= {"runs": []}
    assert outlook(*with_task(results, task)) == []
    task["baselines"] = {"gzip": 1.9, "xz": 1.8}
    results = make.results(tasks=[task])
    said = "no model is better than gzip (1.900) and xz (1.800)."
    assert outlook(*with_task(results, task)) == [said]


@pytest.mark.parametrize(
    ("slopes", "asked"),
    [
        ([0.1, 0.1], "may solve it within twice the steps"),
        ([0.07, 0.07], "may need more than twice the steps"),
        ([0.0, 0.0], ""),
        ([0.1, 0.0], ""),  # most curves must rise
        ([0.1, 0.2, 0.0], "may solve it within twice the steps"),
    ],
)
def test_a_curve_that_still_rises_asks_for_the_steps_to_its_goal(make, slopes, asked):
    """The score is 0.9 at step 1000, and rises by a slope per factor e of the steps."""
    task = make.task(problems=1024)
    runs = [
        run
        | {"steps": 1000}
        | {
            "curve": [
                CURVE | {"step": n, "metric": 0.9 + slope * math.log(n / 1000)} for n in STEPS
            ]
        }
        for run, slope in zip(
            runs_at(make, task, {"h3*2": [0.9] * len(slopes)}), slopes, strict=True
        )
    ]
    assert math.expm1(0.05 / 0.1) < 1 < math.expm1(0.05 / 0.07)
    said = outlook(*with_task(make.results(tasks=[task], models=["h3*2"], runs=runs), task))
    assert said == [] if not asked else asked in said[0]


@pytest.mark.parametrize(
    ("score", "curve"),
    [
        (0.97, lambda n: 0.97 + 0.1 * math.log(n / 1000)),  # solved
        (0.90, lambda n: min(0.9, 0.9 + 0.4 * math.log(n / 500))),  # flat in the second half
        (0.90, lambda n: 0.7 + 0.1 * math.log(n / 1000) + 0.2 * (n % 100 == 0)),  # up and down
    ],
)
def test_no_steps_are_asked_for_what_is_solved_or_does_not_rise(make, score, curve):
    task = make.task(problems=1024)
    points = [CURVE | {"step": n, "metric": curve(n)} for n in range(50, 1001, 50)]
    points.insert(-1, CURVE | {"step": 990, "metric": None})  # a look at the loss alone
    runs = runs_at(make, task, {"h3*2": [score, score]})
    runs = [run | {"curve": points, "steps": 1000} for run in runs]
    results = make.results(tasks=[task], models=["h3*2"], runs=runs)
    assert outlook(*with_task(results, task)) == []


@pytest.mark.parametrize("end", [0.97, None])
@pytest.mark.parametrize(("flat", "told"), [(1, True), (2, False)])
def test_seeds_that_solved_a_task_or_diverged_ask_for_no_steps(make, end, flat, told):
    """Two others rise; advice rests on most of the others."""
    task, slopes = make.task(problems=1024), [0.1] * 4 + [0.0] * flat
    runs = runs_at(make, task, {"h3*2": [0.9] * len(slopes)})
    for run, slope in zip(runs, slopes, strict=True):
        points = [CURVE | {"step": n, "metric": 0.9 + slope * math.log(n / 1000)} for n in STEPS]
        run |= {"curve": points, "steps": 1000}
    for run in runs[:2]:
        run["by_length"]["10"] = {task["metric"]: end}
    results = make.results(tasks=[task], models=["h3*2"], runs=runs)
    said = [
        "“h3*2” may solve it within twice the steps." in t
        for t in outlook(*with_task(results, task))
    ]
    assert said == [True] * told


@pytest.mark.parametrize(("slope", "told"), [(0.1, True), (0.02, False)])
def test_a_loss_that_falls_by_a_hundredth_asks_for_more_steps(make, slope, told):
    """The loss is about 2, and falls by ``slope`` per factor e of the steps."""
    task = make.text_task()
    curve = [CURVE | {"step": n, "metric": 2 - slope * math.log(n / 1000)} for n in STEPS]
    runs = runs_at(make, task, {"h3*2": [2.0, 2.0]})
    runs = [run | {"curve": curve, "steps": 1000} for run in runs]
    said = outlook(*with_task(make.results(tasks=[task], models=["h3*2"], runs=runs), task))
    assert [text.endswith("when training ended: “h3*2”.") for text in said] == [True] * told


def test_who_solved_a_task_is_said_or_how_far_the_best_is_from_a_guess(make):
    task = make.task(problems=1024, chance=0.002)
    few = {"h3*2": [0.97, 0.96, 0.3], "lstm*2": [0.2, 0.2, 0.2]}
    none = {"h3*2": [0.928, 0.312, 0.320], "lstm*2": [0.2, 0.2, 0.2]}
    said = {}
    for name, scores in (("few", few), ("none", none)):
        runs = runs_at(make, task, scores)
        found = typed(make.results(tasks=[task], models=[*scores], runs=runs))
        said[name] = decision.solvers(answers(found).every[0])
    assert said["few"] == "Solved by “h3*2” with 2 of 3 seeds."
    assert said["none"] == (
        "Not solved (0.95 string accuracy): the best, “h3*2”, has 0.320, 0.318 above a guess."
    )


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (250.0, "“h3*2” decodes fastest: 290 tok/s at 1,024 tokens."),
        (290.0, "“h3*2” decodes fastest (no clear difference to “lstm*2”): 290 tok/s at 1,024"),
    ],
)
def test_the_fastest_of_the_models_that_solved_a_task_is_said(make, second, said):
    """A faster model that has solved it with one seed of three does not count."""
    task = make.task(problems=1024, eval_lengths=[10])
    speeds = {"h3*2": 290.0, "lstm*2": second, "fast": 900.0}
    scores = {"h3*2": [1.0, 1.0, 0.2], "lstm*2": [0.99] * 3, "fast": [1.0, 0.2, 0.2]}
    results = make.results(
        tasks=[task],
        models=[*scores],
        runs=runs_at(make, task, scores),
        speed=[
            make.speed(model, task=task["spec"], decode_tokens_per_second={"1024": rate})
            for model, rate in speeds.items()
        ],
    )
    (sentence,) = decision.fastest_solvers(answers(typed(results)))
    assert sentence.startswith(
        f"Copying: of the models that solved it with more than half of their seeds {said}"
    )
    assert said in " ".join(printed(results, width=200).split())
    assert said in page_of(results)


def test_what_a_choice_scores_on_the_other_tasks_is_said(make):
    text, copying = make.text_task(eval_lengths=[256]), make.task(eval_lengths=[10])
    runs = runs_at(make, text, {"a": [2.0], "b": [2.3]})
    runs += runs_at(make, copying, {"a": [0.2], "b": [1.0]})
    results = make.results(tasks=[text, copying], models=["a", "b"], runs=runs, speed=[])
    assert decision.elsewhere(answers(typed(results))) == [
        "“a” elsewhere: Copying at 10 0.200 (0.800 worse than “b”).",
        "“b” elsewhere: Text at 256 2.300 (0.300 worse than “a”).",
    ]
    for shown in (page_of(results), printed(results, width=200)):
        assert "“b” elsewhere: Text at 256 2.300 (0.300 worse than “a”)." in shown


def test_unequal_training_is_said_beside_scores_beyond_the_training_length(make):
    task = make.task(problems=1024, eval_lengths=[10, 20])
    runs = runs_at(make, task, {"h3*2": [1.0, 0.99, 1.0], "lstm*2": [1.0, 1.0, 0.99]})
    for steps, said in ((700, False), (100, True)):
        for run in runs[:3]:
            run["steps"] = steps
        results = make.results(tasks=[task], models=["h3*2", "lstm*2"], runs=runs)
        rows = decided(results)
        assert "unequal" not in rows["Copying", "10"].score
        told = "unequal training: 100 to 700 updates" in rows["Copying", "20"].score
        assert told == said


def test_a_model_that_did_not_solve_its_task_is_said_not_to(make):
    task = make.task(problems=1024, eval_lengths=[10])
    runs = runs_at(make, task, {"h3*2": [0.5, 0.51, 0.52], "lstm*2": [0.2, 0.2, 0.2]})
    (row,) = decided(make.results(tasks=[task], models=["h3*2", "lstm*2"], runs=runs)).values()
    assert row.score == "0.510 string accuracy, not solved"


def test_every_pair_has_a_row_with_its_interval_and_its_cost(make):
    task = make.text_task(eval_lengths=[256])
    scores = {"a": [2.0, 2.01, 2.02], "b": [2.8, 2.81, 2.82], "c": [2.0, 2.02, 2.01]}
    times = {"seconds": 60.0, "compile_seconds": 10.0}
    runs = [run | times for run in runs_at(make, task, scores)]
    results = make.results(tasks=[task], models=[*scores], runs=runs)
    rows = pair_rows(answers(typed(results)).every[0])
    assert [row.verdict.partition(" after")[0] for row in rows[:2]] == ["told apart"] * 2
    assert rows[0].pair == "“a” against “b”"
    assert rows[0].difference == "-0.800"
    assert rows[0].verdict == "told apart after 3 seeds each, 6 min of training"
    assert rows[2].verdict.startswith("not told apart")
    for text in (page_of(results), printed(results, width=140)):
        assert "told apart after 3 seeds each, 6 min of training" in text
        assert "Training took 9 minutes, added over all runs. Compiling" in text
        assert "Compiling and loading kernels took 90 seconds more." in text


def test_a_pair_is_told_apart_after_the_look_that_told_it(make):
    task = make.text_task(eval_lengths=[256])
    scores = {"a": [2.0, 2.01, 2.02, 2.0, 2.01], "b": [2.8, 2.81, 2.82, 2.8, 2.8]}
    protocol = {"name": "sweep", "looks": 4}
    runs = runs_at(make, task, scores)
    results = make.results(tasks=[task], models=[*scores], runs=runs, protocol=protocol)
    (answer,) = answers(typed(results)).every
    assert answer.seeds_until_told("a", "b") == 3
