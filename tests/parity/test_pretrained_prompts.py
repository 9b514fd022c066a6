"""The official prompts, labels and scores of the pretrained experiments are ours."""

import itertools

from stateline.probe import prompts
from stateline.probe.prompts import Entry
from stateline.probe.scoring import exact_match, f1, normalised
from tests.parity.cases import Case, covers


def entry(line: str) -> Entry:
    """The entry that a line of a phone book shows."""
    name, _, number = line.partition(": ")
    return Entry(name, number)


@covers("pretrained_prompts")
def test_prompts_of_phone_books(case: Case) -> None:
    for group in case.about["phone_book"]:
        for prompt, label in zip(group["input"], group["label"], strict=True):
            book, shown, asked = prompt.split("\n\n")
            entries = [entry(line) for line in book.splitlines()]
            (wanted,) = [e for e in entries if e.name == asked.removesuffix(":")]
            made = prompts.phone_book(entries, [entry(x) for x in shown.splitlines()], wanted)
            assert len(entries) == group["length"]
            assert made == (prompt, (label,))


@covers("pretrained_prompts")
def test_prompts_of_copies(case: Case) -> None:
    groups = [*case.about["c4_copy"], *case.about["c4_copy_random"]]
    assert groups
    for group in groups:
        for prompt, label in zip(group["input"], group["label"], strict=True):
            text = prompt.split("\n\n")[0]
            assert len(text.split()) == group["length"]
            assert prompts.copy(prompts.one_line(f"{text}\n")) == (prompt, (label,))


@covers("pretrained_prompts")
def test_windows_of_text_are_of_joined_documents(case: Case) -> None:
    for group in case.about["c4_copy"]:
        borders = [document["text"].split() for document in group["docs"]]
        pairs = {(a, b) for words in borders for a, b in itertools.pairwise(words)}
        pairs |= {(a[-1], b[0]) for a in borders for b in borders}
        for prompt in group["input"]:
            words = prompt.split("\n\n")[0].split()
            assert set(itertools.pairwise(words)) <= pairs


@covers("pretrained_prompts")
def test_scores_of_answers(case: Case) -> None:
    for about in case.about["qa"]:
        found, accepted = about["pred"], about["golds"]
        assert normalised(found) == about["norm_pred"]
        assert [normalised(text) for text in accepted] == about["norm_golds"]
        assert exact_match(found, accepted, normalise=True) == about["em"]
        assert abs(f1(found, accepted) - about["f1"]) < 1e-12
