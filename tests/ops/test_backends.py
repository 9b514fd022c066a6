"""Which backend runs a call, and that every layer goes through this choice."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline import ops
from stateline.cli import main
from stateline.errors import InputError
from stateline.layers import LAYERS
from stateline.ops import OPS, dispatch, fft_conv, op, register_backend, use_backend
from stateline.ops.dispatch import tensors_of
from stateline.ops.op import Sizes

U, KERNEL = torch.ones(1, 3, 1), torch.ones(1, 2)
SIZES = Sizes(1, 2, 4, torch.device("cpu"))
TRITON = (
    "these kernels run on cuda, not on cpu"
    if torch.cuda.is_available()
    else "import failed: Triton needs a CUDA device (TRITON_INTERPRET=1 interprets it on the CPU)"
)
try:
    import triton  # noqa: F401
except ImportError:
    TRITON = "import failed: triton is not installed: pip install triton"
SSM = ops.DiagonalWeights(*(torch.ones(1, 1, 2),) * 3)
STATE = torch.zeros(1, 1, 1, 2)


def run(name: str, **keywords: Any) -> Any:
    example = OPS[name].example(SIZES)
    return getattr(ops, example.function or name)(*example.inputs, **keywords)


class Delegate:
    """A backend that counts its calls, and leaves the work to the ``torch`` backend."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, set[str]()

    def __getattr__(self, function: str) -> Callable[..., Any]:
        if function in ("can_use", "gains", "available"):
            raise AttributeError(function)
        run = getattr(OPS[self.name].module("torch")[0], function)

        def counted(*inputs: Any) -> Any:
            self.calls.add(function)
            return run(*inputs)

        return counted


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """``register_backend`` until the end of the test, preferred to all others."""
    added = []

    def until_the_end(name: str, module: object, called: str = "mine", before: str = "") -> None:
        register_backend(name, called, module, before=before or OPS[name].backends[0])
        added.append((name, called))

    yield until_the_end
    for name, called in added:
        OPS[name].remove(called)


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    for known in OPS.values():
        known.forget()


def test_every_folder_is_an_op_and_every_op_has_a_folder() -> None:
    assert ops.__file__ is not None
    folders = {path.parent.name for path in Path(ops.__file__).parent.glob("*/reference.py")}
    assert folders == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_definition_which_is_the_last_choice(name: str) -> None:
    assert OPS[name].backends[-1] == "reference"
    assert "torch" in OPS[name].backends


@pytest.mark.parametrize("name", OPS)
def test_torch_and_reference_have_the_same_functions(name: str) -> None:
    package = f"stateline.ops.{name}"
    functions = {f: getattr(ops, f) for f in ops.__all__}
    public = {f for f, value in functions.items() if getattr(value, "__module__", "") == package}
    public = {f for f in public if not isinstance(functions[f], type)}
    assert public
    for function in public:
        OPS[name].prepare(function)
        found = getattr(OPS[name].candidates, function)
        assert (found["torch"].unavailable, found["reference"].unavailable) == ("", "")


@pytest.mark.parametrize("name", OPS)
def test_no_rows_are_an_answer_on_every_backend(name: str) -> None:
    example = OPS[name].example(Sizes(0, 5, 16, torch.device("cpu")))
    function = example.function or name
    reasons = OPS[name].reasons(function, *example.inputs)
    shapes = {
        tuple(x.shape for x in tensors_of(getattr(ops, function)(*example.inputs, backend=chosen)))
        for chosen, reason in reasons.items()
        if not reason
    }
    assert len(shapes) == 1


@pytest.mark.parametrize("name", OPS)
def test_results_are_where_the_arguments_are(name: str) -> None:
    """Also where PyTorch makes new tensors elsewhere by default."""
    example = OPS[name].example(SIZES)
    function = example.function or name
    for x in tensors_of(example.inputs):
        x.requires_grad_(x.is_floating_point())
    for backend, reason in OPS[name].reasons(function, *example.inputs).items():
        if reason:
            continue
        with torch.device("meta"):
            found = list(tensors_of([getattr(ops, function)(*example.inputs, backend=backend)]))
            sum(y.sum() for y in found).backward()  # type: ignore[union-attr]
        assert {y.device.type for y in found} == {"cpu"}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axes", [(-1, 0), (1, 2)])
def test_arguments_may_lie_in_memory_in_any_order(name: str, axes: tuple[int, int]) -> None:
    """Also gradients, which kernels could write into memory that is laid out like an argument."""
    torch.manual_seed(0)
    example = OPS[name].example(Sizes(2, 20, 128, torch.device("cpu"), torch.float64))
    function = example.function or name

    def moved(x: Any) -> Any:
        if isinstance(x, tuple):
            parts = map(moved, x)
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        if not isinstance(x, Tensor) or x.ndim <= max(axes):
            return x
        return x.transpose(*axes).contiguous().transpose(*axes)

    def results(inputs: tuple[Any, ...], backend: str) -> list[Tensor]:
        leaves = [x for x in tensors_of(inputs) if x.is_floating_point()]
        for leaf in leaves:
            leaf.requires_grad_()
        found = list(tensors_of([getattr(ops, function)(*inputs, backend=backend)]))
        total = sum((y * torch.arange(y.numel()).view(y.shape).sin()).sum() for y in found)
        return [*found, *torch.autograd.grad(total, leaves, allow_unused=True)]  # type: ignore[arg-type]

    for backend, reason in OPS[name].reasons(function, *example.inputs).items():
        if reason:
            continue
        wanted = results(example.inputs, backend)
        for y, right in zip(results(moved(example.inputs), backend), wanted, strict=True):
            torch.testing.assert_close(y, right, rtol=1e-9, atol=1e-9)


class TestExplicitChoice:
    @pytest.mark.parametrize("name", OPS)
    def test_an_unknown_backend_is_refused_and_the_known_ones_are_listed(self, name: str) -> None:
        with pytest.raises(InputError) as caught:
            run(name, backend="unheard_of")
        known = ", ".join(sorted([*OPS[name].backends, "auto"]))
        assert str(caught.value) == f"unknown backend of {name} 'unheard_of': Known: {known}"

    def test_the_nearest_backend_is_offered(self) -> None:
        with pytest.raises(InputError, match="did you mean 'reference'"):
            fft_conv(U, KERNEL, backend="referense")

    def test_a_backend_that_cannot_run_the_call_is_refused_with_its_reason(
        self, register: Callable[..., None]
    ) -> None:
        module = SimpleNamespace(fft_conv=print, can_use=lambda function, *_: f"{function} is shy")
        register("fft_conv", module)
        with pytest.raises(InputError, match=r"'mine' cannot run .* fft_conv is shy; leave"):
            fft_conv(U, KERNEL, backend="mine")

    def test_a_backend_that_gains_nothing_runs_if_asked_for_or_if_no_other_can(
        self, register: Callable[..., None]
    ) -> None:
        slow = torch.full_like(U, 7)
        register("fft_conv", SimpleNamespace(fft_conv=lambda *_: slow, gains=lambda *_: False))
        assert fft_conv(U, KERNEL) is not slow
        assert fft_conv(U, KERNEL, backend="mine") is slow
        with use_backend(fft_conv="mine"):
            assert fft_conv(U, KERNEL) is slow
        found = OPS["fft_conv"].candidates.fft_conv
        for name in ("torch", "reference"):
            found[name] = found[name]._replace(unavailable="it is closed")
        assert fft_conv(U.double(), KERNEL) is slow

    def test_a_backend_that_is_not_available_is_refused_with_its_reason(
        self, register: Callable[..., None]
    ) -> None:
        register("fft_conv", SimpleNamespace(fft_conv=len, available=lambda: "no licence"))
        with pytest.raises(InputError, match=r"'mine' cannot run .*: no licence"):
            fft_conv(U, KERNEL, backend="mine")
        assert fft_conv(U, KERNEL).round().flatten().tolist() == [1.0, 2.0, 2.0]

    def test_a_module_that_cannot_be_imported_is_refused_with_the_reason(
        self, register: Callable[..., None]
    ) -> None:
        register("fft_conv", "not_there.at_all")
        with pytest.raises(InputError, match="import failed: No module named 'not_there'"):
            fft_conv(U, KERNEL, backend="mine")
        assert fft_conv(U, KERNEL).round().flatten().tolist() == [1.0, 2.0, 2.0]

    def test_a_function_that_a_backend_does_not_have_is_refused_or_left_to_another(
        self, register: Callable[..., None]
    ) -> None:
        module = SimpleNamespace(diagonal_ssm=lambda u, *_: (7 * u, None))
        register("diagonal_ssm", module)
        assert ops.diagonal_ssm(U, SSM)[0].equal(7 * U)
        y, _ = ops.diagonal_ssm_step(U[:, 0], SSM, STATE)
        assert not y.equal(7 * U[:, 0])
        with pytest.raises(InputError, match="it has no diagonal_ssm_step"):
            ops.diagonal_ssm_step(U[:, 0], SSM, STATE, backend="mine")

    def test_it_beats_the_preference(self) -> None:
        with use_backend("torch"):
            assert not uses_operator(backend="reference")


def uses_operator(**keywords: Any) -> bool:
    """Whether ``fft_conv`` runs as a function with its own gradient: the definition does not."""
    y = fft_conv(U.clone().requires_grad_(), KERNEL, **keywords)
    assert y.grad_fn is not None
    return "Recorded" in y.grad_fn.name()


class TestPreference:
    def test_it_counts_inside_its_block_only(self) -> None:
        before = uses_operator()
        with use_backend("reference"):
            inside = uses_operator()
        assert (before, inside, uses_operator()) == (True, False, True)

    def test_it_ends_with_an_error(self) -> None:
        with pytest.raises(KeyError), use_backend("reference"):
            raise KeyError
        assert uses_operator()

    def test_the_inner_block_counts(self) -> None:
        with use_backend("reference"):
            with use_backend("torch"):
                assert uses_operator()
            with use_backend("auto"):
                assert uses_operator()
            assert not uses_operator()

    def test_single_ops_can_be_chosen_and_others_keep_theirs(self) -> None:
        with use_backend(fft_conv="reference"):
            assert not uses_operator()
        with use_backend("reference"), use_backend(attention="torch"):
            assert not uses_operator()
        with use_backend("reference", fft_conv="torch"):
            assert uses_operator()

    @pytest.mark.parametrize(
        ("general", "single", "message"),
        [
            ("tritn", {}, "unknown backend 'tritn'"),
            (None, {"fft_con": "torch"}, "unknown op 'fft_con': did you mean 'fft_conv'"),
            (None, {"fft_conv": "numba"}, "unknown backend of fft_conv 'numba'"),
        ],
    )
    def test_a_name_that_no_op_has_is_refused_at_once(
        self, general: str | None, single: dict[str, str], message: str
    ) -> None:
        with pytest.raises(InputError, match=message), use_backend(general, **single):
            pass

    def test_another_thread_does_not_see_it_unless_it_is_given_the_context(self) -> None:
        with use_backend("reference"), ThreadPoolExecutor(1) as pool:
            assert pool.submit(uses_operator).result()
            assert not pool.submit(copy_context().run, uses_operator).result()

    def test_blocks_of_two_threads_do_not_meet(self) -> None:
        def inside(name: str) -> set[bool]:
            with use_backend(name):
                return {uses_operator() for _ in range(50)}

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(inside, ["torch", "reference"])) == [{True}, {False}]

    def test_what_it_cannot_run_goes_elsewhere_and_this_is_said_once(
        self, register: Callable[..., None], caplog: pytest.LogCaptureFixture
    ) -> None:
        register("fft_conv", SimpleNamespace(fft_conv=print, can_use=lambda *_: "it is closed"))
        with use_backend("mine"):
            for _ in range(3):
                fft_conv(U, KERNEL)
                run("attention")
        assert caplog.messages == [
            "fft_conv cannot run on backend 'mine': it is closed; auto chooses",
            "attention cannot run on backend 'mine': attention has no such backend; auto chooses",
        ]

    def test_each_choice_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG, "stateline.ops"):
            for _ in range(2):
                fft_conv(U, KERNEL)
                fft_conv(U, KERNEL, backend="reference")
        assert caplog.messages == [
            "fft_conv runs on backend 'torch'",
            "fft_conv runs on backend 'reference'",
        ]


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def read_anew(self) -> Iterator[None]:
        dispatch.from_environment.cache_clear()
        yield
        dispatch.from_environment.cache_clear()

    @pytest.mark.parametrize(
        ("text", "operator"),
        [
            ("", True),
            ("auto", True),
            ("reference", False),
            ("fft_conv=reference, attention=torch", False),
            ("reference,fft_conv=torch", True),
            ("attention=reference", True),
        ],
    )
    def test_it_sets_the_preference(
        self, monkeypatch: pytest.MonkeyPatch, text: str, operator: bool
    ) -> None:
        monkeypatch.setenv("STATELINE_BACKEND", text)
        assert uses_operator() == operator
        with use_backend("torch"):
            assert uses_operator()
        with use_backend(attention="torch"):
            assert uses_operator() == operator

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("numbas", "STATELINE_BACKEND=numbas: unknown backend 'numbas': did you mean 'numba'"),
            ("fft=torch", "STATELINE_BACKEND=fft=torch: unknown op 'fft'"),
            ("torch,numba", "can name only one backend for all ops, got 'torch,numba'"),
        ],
    )
    def test_what_it_cannot_mean_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, text: str, message: str
    ) -> None:
        monkeypatch.setenv("STATELINE_BACKEND", text)
        with pytest.raises(InputError, match=message):
            fft_conv(U, KERNEL)

    def test_a_process_reads_it(self) -> None:
        code = (
            "import logging, torch; logging.basicConfig(level='DEBUG');"
            "from stateline.ops import fft_conv; fft_conv(torch.ones(1, 3, 1), torch.ones(1, 2))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "STATELINE_BACKEND": "reference"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "fft_conv runs on backend 'reference'" in done.stderr


class TestRegistration:
    def test_it_stands_before_the_backend_named(self, register: Callable[..., None]) -> None:
        before = OPS["diagonal_ssm"].backends
        register("diagonal_ssm", Delegate("diagonal_ssm"), before="torch")
        assert OPS["diagonal_ssm"].backends == ("numba", "triton", "mine", *before[2:])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("fft_con", "mine", None), "unknown op 'fft_con'"),
            (("fft_conv", "torch", None), "fft_conv already has a backend 'torch'"),
            (("fft_conv", "auto", None), "fft_conv already has a backend 'auto'"),
            (("fft_conv", 3, None), "name must be a str, got a int"),
            (
                ("fft_conv", "mine", None),
                "'mine' of fft_conv needs a function of these names: fft_conv, got a NoneType$",
            ),
            (
                ("fft_conv", "mine", SimpleNamespace(fft_conv=3)),
                "got a SimpleNamespace, whose fft_conv cannot be called$",
            ),
            (
                ("pointwise", "mine", None),
                "of these names: feed_forward, linear_stepper, swiglu, rms_norm, rotary, got a",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, unannotated: None, arguments: tuple[str, Any, None], message: str
    ) -> None:
        with pytest.raises(InputError, match=message):
            register_backend(*arguments)
        with pytest.raises(InputError, match="unknown backend of fft_conv 'torhc'"):
            register_backend("fft_conv", "mine", None, before="torhc")
        assert "mine" not in OPS["fft_conv"].backends

    @pytest.mark.parametrize("name", ["unknown", "torch", "reference"])
    def test_only_own_backends_are_removed(self, name: str) -> None:
        with pytest.raises(InputError, match=f"fft_conv has no own backend '{name}'"):
            OPS["fft_conv"].remove(name)
        assert "torch" in OPS["fft_conv"].backends

    def test_an_installed_package_needs_no_import(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / "third_party.py").write_text("def fft_conv(u, kernel):\n    return 5 * u\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        entries = [
            EntryPoint("fft_conv.third", "third_party", op.GROUP),
            EntryPoint("fft.third", "third_party", op.GROUP),
        ]
        monkeypatch.setattr(op, "entry_points", lambda **_: entries)
        op._add_installed.cache_clear()
        try:
            assert OPS["fft_conv"].backends == (
                "triton",
                "third",
                "torch",
                "reference",
            )
            assert "third_party" not in sys.modules
            OPS["fft_conv"].forget()
            assert fft_conv(U, KERNEL).equal(5 * U)
            assert "entry point 'fft.third' of stateline.backends is ignored" in caplog.text
        finally:
            OPS["fft_conv"].remove("third")


def calls_of(layer: Any) -> dict[str, set[str]]:
    """For each verb, the functions of ops that it calls."""
    spies = {name: Delegate(name) for name in OPS}
    for name, spy in spies.items():
        register_backend(name, "spy", spy, before=OPS[name].backends[0])
    found = {}
    try:
        x = layer.example_input(2, 37)
        with torch.no_grad():
            state = layer.init_state(2, capacity=64)
            for verb, call in (
                ("forward", lambda: layer(x)),
                ("forward_chunk", lambda: layer.forward_chunk(x, state)),
                ("step", lambda: layer.step(x[:, 0], state)),
            ):
                for spy in spies.values():
                    spy.calls.clear()
                call()
                found[verb] = {f for spy in spies.values() for f in spy.calls}
    finally:
        for name in OPS:
            OPS[name].remove("spy")
    return found


DIAGONAL = {
    "forward": "diagonal_ssm fft_conv",
    "forward_chunk": "diagonal_ssm fft_conv",
    "step": "diagonal_ssm_step",
}
DISCRETISED = {verb: f"{functions} discretize" for verb, functions in DIAGONAL.items()}
DECAYING = {
    "forward": "linear_attention",
    "forward_chunk": "linear_attention",
    "step": "linear_attention_step",
}
NORMED = {verb: f"{functions} rms_norm" for verb, functions in DECAYING.items()}
REACHED = {
    "aft": dict.fromkeys(("forward", "forward_chunk", "step"), ""),
    "attention": dict.fromkeys(("forward", "forward_chunk", "step"), "attention"),
    "block_recurrent": dict.fromkeys(("forward", "forward_chunk", "step"), "local_attention"),
    "block_state": {
        "forward": "attention diagonal_ssm discretize fft_conv local_attention rms_norm",
        "forward_chunk": "diagonal_ssm discretize fft_conv local_attention rms_norm",
        "step": "diagonal_ssm_step discretize local_attention rms_norm",
    },
    "channel_mixing": dict.fromkeys(("forward", "forward_chunk", "step"), ""),
    "diagonal_ssm": DISCRETISED,
    "dss": DIAGONAL,
    "feed_forward": {"forward": "feed_forward", "forward_chunk": "feed_forward", "step": ""},
    "gated_conv": {
        "forward": "short_conv",
        "forward_chunk": "short_conv",
        "step": "short_conv_step",
    },
    "gated_delta_net": {
        "forward": "gated_delta_rule rms_norm short_conv",
        "forward_chunk": "gated_delta_rule rms_norm short_conv",
        "step": "gated_delta_rule_step rms_norm short_conv_step",
    },
    "gated_linear_attention": NORMED,
    "gss": DIAGONAL,
    "h3": {
        "forward": "diagonal_ssm discretize fft_conv h3_core shift_taps short_conv",
        "forward_chunk": ("diagonal_ssm discretize fft_conv h3_core shift_taps short_conv"),
        "step": "diagonal_ssm_step discretize fft_conv h3_core_step shift_taps short_conv "
        "short_conv_step",
    },
    "hyena": {
        "forward": "fft_conv short_conv",
        "forward_chunk": "fft_conv short_conv",
        "step": "short_conv_step",
    },
    "kimi_delta_attention": {
        "forward": "delta_rule rms_norm short_conv",
        "forward_chunk": "delta_rule rms_norm short_conv",
        "step": "delta_rule_step rms_norm short_conv_step",
    },
    "latent_attention": dict.fromkeys(
        ("forward", "forward_chunk", "step"), "attention rms_norm rotary"
    ),
    "lightning_attention": NORMED,
    "linear_attention": DECAYING,
    "hgrn2": NORMED,
    "long_conv": {
        "forward": "fft_conv short_conv",
        "forward_chunk": "fft_conv short_conv",
        "step": "short_conv_step",
    },
    "lstm": dict.fromkeys(("forward", "forward_chunk", "step"), "lstm"),
    "mamba": {
        "forward": "selective_scan short_conv",
        "forward_chunk": "selective_scan short_conv",
        "step": "selective_scan_step short_conv_step",
    },
    "mamba2": {
        "forward": "linear_attention short_conv",
        "forward_chunk": "linear_attention short_conv",
        "step": "linear_attention_step short_conv_step",
    },
    "mamba3": {"forward": "linear_attention", "forward_chunk": "linear_attention", "step": ""},
    "mlstm": DECAYING,
    "moe": dict.fromkeys(("forward", "forward_chunk", "step"), "swiglu"),
    "retention": {verb: f"{functions} rotary" for verb, functions in NORMED.items()},
    "rg_lru": {
        "forward": "selective_scan short_conv",
        "forward_chunk": "selective_scan short_conv",
        "step": "selective_scan_step short_conv_step",
    },
    "rwkv7": {"forward": "delta_rule", "forward_chunk": "delta_rule", "step": "delta_rule_step"},
    "s4": {
        "forward": "dplr_ssm fft_conv",
        "forward_chunk": "dplr_ssm fft_conv",
        "step": "dplr_ssm_step",
    },
    "s4d": DISCRETISED,
    "s5": {
        "forward": "mimo_ssm",
        "forward_chunk": "mimo_ssm",
        "step": "mimo_ssm_step",
    },
    "shift_ssm": {
        "forward": "fft_conv shift_taps short_conv",
        "forward_chunk": "fft_conv shift_taps short_conv",
        "step": "fft_conv shift_taps short_conv short_conv_step",
    },
    "slstm": {
        "forward": "slstm short_conv",
        "forward_chunk": "slstm short_conv",
        "step": "slstm short_conv",
    },
    "sliding_attention": dict.fromkeys(("forward", "forward_chunk", "step"), "local_attention"),
}
"""The functions of ops that each verb of a layer calls."""


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("wrong", [torch.zeros(1), torch.zeros(1, 3, 1, dtype=torch.int64), None])
def test_a_result_of_another_shape_or_kind_is_refused(
    register: Callable[..., None], wrong: Any
) -> None:
    inputs = torch.ones(1, 3, 1), torch.ones(1, 2)
    fft_conv(*inputs)  # a call of these shapes has passed
    register("fft_conv", SimpleNamespace(fft_conv=lambda *_: wrong))
    with pytest.raises(InputError, match=r"fft_conv needs .*result 1 of its backend"):
        fft_conv(*inputs)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("given", "returned", "wanted"),
    [
        (torch.float32, torch.float64, "float32"),
        (torch.float32, torch.bfloat16, "float32"),
        (torch.float64, torch.float32, "float64"),
        (torch.bfloat16, torch.float16, "bfloat16 or float32"),
    ],
)
def test_a_result_of_another_precision_is_refused(
    register: Callable[..., None], given: torch.dtype, returned: torch.dtype, wanted: str
) -> None:
    def own(u: Tensor, _: Tensor) -> Tensor:
        return torch.zeros(u.shape, dtype=returned)

    register("fft_conv", SimpleNamespace(fft_conv=own))
    inputs = torch.ones(1, 3, 1, dtype=given), torch.ones(1, 2, dtype=given)
    with pytest.raises(InputError, match=f"returns {wanted} for these inputs, got"):
        fft_conv(*inputs)


@pytest.mark.usefixtures("unannotated")
def test_a_backend_may_follow_autocast(register: Callable[..., None]) -> None:
    register("fft_conv", SimpleNamespace(fft_conv=lambda u, _: u.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert fft_conv(torch.ones(1, 3, 1), torch.ones(1, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", LAYERS)
def test_a_backend_of_your_own_is_called_by_every_layer_that_uses_the_op(kind: str) -> None:
    wanted = {verb: set(functions.split()) for verb, functions in REACHED[kind].items()}
    assert calls_of(LAYERS[kind](16)) == wanted


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("verb", ["forward", "step"])
def test_compiled_layers_call_the_backends_too(verb: str, register: Callable[..., None]) -> None:
    """In one graph; a call that the backend cannot run goes to the next."""
    layer = LAYERS["h3"](8)
    x, state = layer.example_input(2, 9), layer.init_state(2)
    inputs = (x,) if verb == "forward" else (x[:, 0], state)
    wanted = getattr(layer, verb)(*inputs)
    register("h3_core", ZeroCore())
    torch.compiler.reset()
    for requires_grad in (False, True):
        with torch.set_grad_enabled(requires_grad):
            found = torch.compile(getattr(layer, verb), fullgraph=True, backend="eager")(*inputs)
        y, plain = (found[0], wanted[0]) if verb == "step" else (found, wanted)
        expected = plain if requires_grad else layer.out_proj(torch.zeros_like(plain))
        torch.testing.assert_close(y, expected)


class ZeroCore:
    """Returns zeros where no gradient is wanted."""

    @staticmethod
    def can_use(_: str, *inputs: Tensor) -> str:
        return "no gradients" if dispatch.wants_gradient(*inputs) else ""

    @staticmethod
    def h3_core(q: Tensor, *_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(q), None

    @staticmethod
    def h3_core_step(q: Tensor, *rest: Any) -> tuple[Tensor, Any]:
        return torch.zeros_like(q), rest[-1]


class TestTable:
    """``stateline check --backends``."""

    def test_it_shows_what_auto_chooses_and_why_not_the_others(
        self,
        register: Callable[..., None],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")  # no reason is divided

        def can_use(function: str, u: Tensor, _: Tensor) -> str:
            if u.dtype == torch.float64:
                return "float64 is too wide"
            return "gradients need float32" if u.requires_grad and u.dtype.itemsize < 4 else ""

        register("fft_conv", SimpleNamespace(fft_conv=print, can_use=can_use))
        register("fft_conv", "not_there", called="broken")
        assert main(["check", "--backends", "--device", "cpu"]) == 0
        rows = capsys.readouterr().out.splitlines()
        first = next(i for i, row in enumerate(rows) if row.startswith("fft_conv"))
        assert [
            row.strip().split(maxsplit=5 if i == 0 else 4) for i, row in enumerate(rows[first:][:5])
        ] == [
            ["fft_conv", "broken", "-", "-", "-", "import failed: No module named 'not_there'"],
            ["mine", "both", "inference", "-", "gradients need float32; float64 is too wide"],
            ["triton", "-", "-", "-", TRITON],
            ["torch", "-", "training", "both", "can run"],
            ["reference", "-", "-", "-", "can run"],
        ]

    def test_a_device_that_is_not_here_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "--backends", "--device", "cuda:9999"]) == 2
        assert "cuda:9999" in capsys.readouterr().err

    @pytest.mark.parametrize("name", OPS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("device", ["meta", "cpu"])
    def test_the_example_of_every_op_runs(self, name: str, dtype: torch.dtype, device: str) -> None:
        example = OPS[name].example(Sizes(2, 8, 64, torch.device(device), dtype))
        getattr(ops, example.function or name)(*example.inputs, backend="torch")


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "numba" in op.backends])
def test_kernels_leave_memory_resizable(name: str) -> None:
    """FSDP frees parameters by resizing their storage, which ``Tensor.numpy`` would forbid."""
    example = OPS[name].example(SIZES)
    tensors = [x for x in tensors_of(example.inputs) if x.is_floating_point()]
    for x in tensors:
        x.requires_grad_()
    function = example.function or name
    if reason := OPS[name].reasons(function, *example.inputs)["numba"]:
        pytest.skip(reason)
    y = getattr(ops, function)(*example.inputs, backend="numba")
    (y if isinstance(y, Tensor) else y[0]).sum().backward()
    assert all(x.untyped_storage().resizable() for x in tensors)


@pytest.mark.usefixtures("unannotated")
def test_a_compiled_function_keeps_the_backend_it_was_compiled_with() -> None:
    torch.compiler.reset()
    with use_backend("reference"):
        compiled = torch.compile(
            lambda u: fft_conv(u, KERNEL), fullgraph=True, backend="eager", dynamic=False
        )
        y = compiled(U)
    assert y.equal(compiled(U))
    assert y.equal(fft_conv(U, KERNEL, backend="reference"))


def test_a_plain_tuple_is_no_weights_even_after_a_right_call() -> None:
    ops.diagonal_ssm(U, SSM)
    with pytest.raises(InputError, match="needs weights as a DiagonalWeights of"):
        ops.diagonal_ssm(U, tuple(SSM))


@pytest.mark.parametrize(
    ("u", "message"),
    [
        (torch.ones(1, 3, 2), r"needs .* of shape"),
        (U.int(), "needs u of dtype float32, .*, got int32"),
        (U.to("meta"), "needs all tensors on one device"),
        (None, "needs a tensor u, got NoneType"),
        ([[[1.0]]], "needs a tensor u, got list"),
    ],
    ids=["shape", "dtype", "device", "None", "list"],
)
def test_wrong_signals_are_refused_even_after_a_right_call(u: Any, message: str) -> None:
    ops.diagonal_ssm(U, SSM)
    ops.diagonal_ssm(u=U, weights=SSM)
    with pytest.raises(InputError, match=message):
        ops.diagonal_ssm(u, SSM)
    with pytest.raises(InputError, match=message):
        ops.diagonal_ssm(u=u, weights=SSM)


@pytest.mark.parametrize("wrong", [lambda u: u, lambda u, kernel, more: (u, kernel, more)])
def test_a_backend_with_other_arguments_says_so(register: Callable[..., None], wrong: Any) -> None:
    register("fft_conv", SimpleNamespace(fft_conv=wrong))
    with pytest.raises(InputError, match=r"takes . arguments besides starts, the definition 2"):
        fft_conv(torch.ones(1, 3, 1), torch.ones(1, 2), backend="mine")


def test_a_prepared_step_refuses_what_does_not_fit_its_weights() -> None:
    wide = ops.DiagonalWeights(*(torch.ones(2, 1, 2),) * 3)
    narrow_step, wide_step = (
        ops.diagonal_ssm_stepper(weights, torch.ones(channels))
        for weights, channels in ((SSM, 1), (wide, 2))
    )
    narrow, wider = ((torch.ones(1, n), torch.zeros(1, n, 1, 2)) for n in (1, 2))
    for step, right, wrong in ((narrow_step, narrow, wider), (wide_step, wider, narrow)):
        step(*right)
        with pytest.raises(InputError, match="of shape"):
            step(*wrong)


def test_the_arguments_of_a_step_have_names() -> None:
    given = {"state": STATE + 1, "weights": SSM, "u": U[:, 0]}
    found, wanted = ops.diagonal_ssm_step(**given), ops.diagonal_ssm_step(U[:, 0], SSM, STATE + 1)
    assert all(map(torch.equal, found, wanted))


def test_tensors_without_data_find_a_backend() -> None:
    with torch.device("meta"):
        layer = LAYERS["h3"](8)
        assert layer(torch.empty(2, 5, 8)).shape == (2, 5, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_state_space_models_alone(dtype: torch.dtype) -> None:
    u = torch.randn(2, 9, 3).to(dtype)
    log_a = torch.randn(3, 4, 2) * 0.1 - 0.5
    b, c, state = torch.randn(3, 4, 2), torch.randn(3, 4, 2), torch.randn(2, 3, 4, 2)
    weights = ops.DiagonalWeights(log_a, b, c)
    wanted = ops.diagonal_ssm(u, weights, state)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.diagonal_ssm(u, weights, state)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.equal(other)
