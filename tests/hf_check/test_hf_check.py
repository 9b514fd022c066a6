"""The diagnosis of Hugging Face models finds planted faults, and blames no healthy model."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from stateline.cli import main
from stateline.errors import InputError
from stateline.hf_check import CALLS, CLAUSES, ModelReport, check_model, load_hugging_face

pytest.importorskip("transformers")

from tests.hf_check.toy import FAULTS, toy

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_law_table.py"


def families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hf_law_table", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRONG = {
    "gpt2": {"plain padding", "plain padded chunks"},
    "gpt_neo": {"plain padding", "plain padded chunks"},
    "mamba": {
        "generate chunks",
        "generate padded chunks",
        "plain chunks",
        "plain padding",
        "plain padded chunks",
    },
    "falcon_mamba": {"generate chunks", "plain chunks", "plain padding"},
    "jamba": {"generate chunks", "plain chunks"},
    "bamba": {"plain steps", "plain chunks", "plain padding", "plain padded chunks"},
    "minimax": {"generate beams"},
    "recurrent_gemma": {"generate steps", "generate chunks", "generate copies"},
    "rwkv": {"generate steps", "generate padding"},
    "xlstm": {"generate padding", "generate beams"},
}
"""What the families of transformers 5.23 get wrong, at least, besides packed rows."""

PACKS = {
    *("gpt2", "gpt_neo", "gpt_neox", "llama", "granite", "qwen2", "qwen3", "mistral"),
    "ministral",
    *("gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"),
}
"""The families that read packed rows right."""


def expected(family: str) -> set[str]:
    return WRONG.get(family, set()) | (set() if family in PACKS else {"training packed"})


def wrong(report: ModelReport) -> set[str]:
    return {f"{found.mode} {found.call}" for found in report.wrong()}


def test_a_healthy_model_is_right_in_every_call() -> None:
    report = check_model(toy())
    assert report.ok, str(report)
    assert report.generate_ok
    assert report.effect > 0.1
    assert all(report.calls("generate").values())
    assert set(report.calls("generate")) == set(CALLS) - {"packed"}
    assert report.calls("training") == {"packed": True}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_its_call(fault: str) -> None:
    report = check_model(toy(fault))
    assert not report.ok
    calls = report.calls("generate") | report.calls("training")
    assert calls[FAULTS[fault]] is False, str(report)
    assert "SOME CALLS ARE WRONG" in str(report)


def test_a_fault_of_one_call_leaves_the_others_safe() -> None:
    calls = check_model(toy("does not take back")).calls("generate")
    assert {call for call, safe in calls.items() if not safe} == {"rollback"}
    calls = check_model(toy("forgets the state in a chunk")).calls("generate")
    assert calls["steps"]
    assert calls["padding"]


def test_a_model_that_ignores_its_context_proves_nothing() -> None:
    model = toy()
    with torch.no_grad():
        model.head.weight.zero_()
    report = check_model(model)
    assert not report.ok
    assert "NOTHING PROVED" in str(report)


def test_a_model_that_cannot_read_a_text_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy()
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(InputError, match="Toy cannot read a text of 40 tokens in one call: ZeroDi"):
        check_model(model)


def test_the_text_must_be_long_enough() -> None:
    with pytest.raises(InputError, match="length at least 24, got"):
        check_model(toy(), length=9)


def test_the_model_itself_is_not_changed() -> None:
    model = toy()
    model.generation_config.eos_token_id = 5
    check_model(model)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == 5


def test_a_call_that_is_not_offered_is_not_blamed() -> None:
    model = toy()
    type(model).forward.__globals__["ToyCache"].is_croppable = False
    try:
        report = check_model(model)
    finally:
        type(model).forward.__globals__["ToyCache"].is_croppable = True
    assert report.ok
    assert report.calls("generate")["rollback"] is None
    assert "not offered: taking tokens back" in str(report)


def test_float32_has_a_wider_limit() -> None:
    assert check_model(toy(), dtype=torch.float32).ok
    assert not check_model(toy("drops a token"), dtype=torch.float32).ok


def test_every_kind_of_call_has_a_clause() -> None:
    assert {clause.call for clause in CLAUSES} == set(CALLS)


@pytest.mark.parametrize(
    "family",
    ["gpt_neox", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba", "bamba"))],
)
def test_a_family_is_judged_as_in_the_study(family: str) -> None:
    report = check_model(families().tiny_model(family), name=family)
    assert wrong(report) == expected(family), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("family", families().FAMILIES)
def test_every_family_is_judged_as_in_the_study(family: str) -> None:
    report = check_model(families().tiny_model(family), name=family)
    assert report.conclusive
    assert wrong(report) >= expected(family), str(report)
    assert expected(family) or report.ok, str(report)
    assert family in WRONG or wrong(report) == expected(family), str(report)


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(family: str) -> str:
        families().tiny_model(family).save_pretrained(tmp_path / family)
        return f"hf:{tmp_path / family}"

    return save


def test_the_command_checks_a_folder(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", saved("gpt_neox"), "lstm", "--device", "cpu"]) == 0
    assert main(["check", saved("mamba"), "--device", "cpu"]) == 1
    assert main(["check", saved("mamba"), "--length", "9"]) == 2
    shown, error = capsys.readouterr()
    assert "length at least 24, got torch.float64, 9" in error
    assert "gpt_neox: every offered call is right" in shown
    assert "lstm: the law holds" in shown
    assert "NOT safe: continuation by several tokens" in shown


def test_a_folder_without_a_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"hf:{tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "give a folder with config.json" in line
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(InputError, match="transformers cannot read the model"):
        load_hugging_face(tmp_path)


@pytest.mark.parametrize("pattern", ["h3 attention(position=rope)"])
def test_our_models_behind_the_interface_of_transformers_are_right(
    pattern: str, tmp_path: Path
) -> None:
    from stateline.hf import wrap
    from stateline.models.config import ModelConfig
    from stateline.models.language_model import LanguageModel

    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(pattern, vocab_size=64, d_model=16)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)  # so that the past matters
    wrapped = wrap(model)
    wrapped.save_pretrained(tmp_path / "ours")
    report = check_model(load_hugging_face(tmp_path / "ours"))
    assert report.ok, str(report)
    assert report.calls("generate")["rollback"]
    packed = [finding for finding in report.findings if finding.call == "packed"]
    assert [finding.error is not None and finding.ok for finding in packed] == [True, True]
