"""What users can import, and how it introduces itself."""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import stateline
from stateline import layers, ops
from stateline.layers import LAYERS, WRAPPERS

EXPORTED = [
    "LAYERS",
    "TASKS",
    "WRAPPERS",
    "ClassifierConfig",
    "Comparison",
    "InputError",
    "LanguageModel",
    "Model",
    "ModelConfig",
    "RegressorConfig",
    "SequenceClassifier",
    "SequenceLayer",
    "SequenceRegressor",
    "TrainConfig",
    "cat_states",
    "check_layer",
    "count_parameters",
    "detach",
    "load",
    "load_classifier",
    "load_model",
    "load_pretrained",
    "load_regressor",
    "load_state",
    "make_task",
    "match_width",
    "nbytes",
    "register_backend",
    "register_layer",
    "register_task",
    "save_model",
    "save_state",
    "select_rows",
    "to",
]


def test_the_exported_names_are_these() -> None:
    """A name that goes or comes is a decision, and an entry in the changelog."""
    assert sorted(stateline.__all__) == sorted(EXPORTED)


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_name_is_what_its_home_defines(name: str) -> None:
    home = import_module(f"stateline.{stateline._MODULE_OF[name]}")
    assert getattr(stateline, name) is getattr(home, name)


def test_type_checkers_see_the_same_names_from_the_same_homes() -> None:
    tree = ast.parse(Path(stateline.__file__).read_text())
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(branch.test) == "TYPE_CHECKING"
    seen = {
        alias.name: node.module
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: f"stateline.{home}" for name, home in stateline._MODULE_OF.items()}
    assert set(seen) == set(stateline.__all__)


def test_type_checkers_refuse_names_that_do_not_exist() -> None:
    """They take every name from a module whose ``__getattr__`` they see."""
    files = Path(stateline.__file__).parent.rglob("*.py")
    assert [file for file in files if "\ndef __getattr__(" in file.read_text("utf-8")] == []


@pytest.mark.parametrize("module", [stateline, layers, ops])
def test_all_names_of_a_module_resolve_and_show(module: ModuleType) -> None:
    for name in module.__all__:
        getattr(module, name)
    assert set(module.__all__) <= set(dir(module))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stateline' has no attribute 'layer'"):
        stateline.layer  # noqa: B018


def test_the_modules_for_whole_models_have_their_functions() -> None:
    for name in ("compare", "evaluate", "generate", "train"):
        assert inspect.isfunction(getattr(import_module(f"stateline.{name}"), name))


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    pages = (Path(__file__).parents[1] / "docs" / "api").glob("*.md")
    entries = "".join(page.read_text(encoding="utf-8") for page in pages)
    names = [*stateline.__all__, "compare.compare"]
    assert [n for n in names if not re.search(rf":: stateline\.{re.escape(n)}\n", entries)] == []


def reachable() -> Iterator[tuple[str, object]]:
    """Public functions and classes, also those in tables, and the methods of the classes."""
    for module in (stateline, layers, ops):
        for name in module.__all__:
            value = getattr(module, name)
            entries = value.values() if isinstance(value, Mapping) else [value]
            for entry in entries:
                if inspect.isclass(entry) or inspect.isfunction(entry):
                    yield f"{name}: {entry.__qualname__}", entry
                if inspect.isclass(entry):
                    yield from _methods(entry)


def _methods(kind: type) -> Iterator[tuple[str, object]]:
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            yield f"{kind.__qualname__}.{name}", method


def test_everything_public_says_what_it_is() -> None:
    silent = [
        title
        for title, value in reachable()
        if not (said := inspect.getdoc(value)) or said.startswith(f"{value.__name__}(")
    ]
    assert silent == ["NORMS: <lambda>"] * 3


OP_FUNCTIONS = [
    name
    for name in ops.__all__
    if hasattr(getattr(ops, name), "declared")
    and not name.endswith(("_step", "_step_", "_stepper", "_every"))
]


@pytest.mark.parametrize("name", OP_FUNCTIONS)
def test_an_op_says_its_equation_arguments_errors_and_source(name: str) -> None:
    function = getattr(ops, name)
    text = function.__doc__
    assert "math:" in text
    for argument in inspect.signature(function).parameters:
        assert f"\n    {argument}: " in text
    for part in ("Returns", "Raises"):
        assert f"\n\n{part}:\n" in text
    assert "\n\nReferences:\n" in text or name == "short_conv"  # names fft_conv, which has them


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_needs_its_width_alone(name: str) -> None:
    assert LAYERS[name](8).d_model == 8


@pytest.mark.parametrize("name", [*LAYERS, *WRAPPERS])
def test_the_options_of_a_layer_are_keywords_with_defaults(name: str) -> None:
    kind = {**LAYERS, **WRAPPERS}[name]
    first, *options = inspect.signature(kind).parameters.values()
    assert first.name == ("d_model" if name in LAYERS else "core")
    assert first.default is inspect.Parameter.empty
    for option in options:
        assert option.kind is inspect.Parameter.KEYWORD_ONLY  # so no **kwargs either
        assert option.default is not inspect.Parameter.empty
        assert option.annotation is not inspect.Parameter.empty


@pytest.mark.parametrize("name", [*LAYERS, *WRAPPERS])
def test_a_layer_is_named_after_its_class_and_lives_in_its_file(name: str) -> None:
    kind = {**LAYERS, **WRAPPERS}[name]
    assert kind.__name__.lower() == name.replace("_", "")
    room = "wrappers" if name in WRAPPERS else "mixers"
    assert kind.__module__ == f"stateline.layers.{room}.{name}"


@pytest.mark.parametrize("name", LAYERS)
def test_optimizer_groups_name_parameters_of_the_layer(name: str) -> None:
    for module in LAYERS[name](8).modules():
        groups = getattr(module, "optimizer_groups", {})
        assert all(hasattr(module, key) for key in groups)
        assert set(groups.values()) <= {"ssm", "no_decay"}
