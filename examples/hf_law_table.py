"""Check tiny random models of transformers: families that we convert, and other recurrent ones.

Run it: python examples/hf_law_table.py

    python examples/hf_law_table.py mamba jamba                  # these families alone
    python examples/hf_law_table.py --write docs/diagnosis.md    # replaces the table of the page

The weights are random: this checks the code of a family, not a published model.
"""

import argparse
import datetime
import re
from pathlib import Path
from typing import Any

import torch

from stateline.generate.hugging_face import transformers_package
from stateline.hf_check import CALLS, LIMITS, ModelReport, check_model

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
HYBRID = ["linear_attention", "full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"] * 2
CONV = ["conv", "full_attention"] * 2

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 128, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "gpt_neox": {key: value for key, value in BASE.items() if key != "num_key_value_heads"},
    "gpt_neo": {"vocab_size": 128, "hidden_size": 64, "num_layers": 4, "num_heads": 4}
    | {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "opt": SMALL | {"ffn_dim": 128, "num_attention_heads": 4, "max_position_embeddings": 512},
    "llama": BASE,
    "granite": BASE,
    "qwen2": BASE,
    "qwen3": BASE | {"head_dim": 16},
    "mistral": BASE | {"sliding_window": 8},
    "ministral": BASE | {"head_dim": 16, "sliding_window": 8, "layer_types": SLIDING},
    "gemma3_text": BASE | {"head_dim": 16, "sliding_window": 8, "layer_types": SLIDING},
    "gpt_oss": BASE
    | {"head_dim": 16, "sliding_window": 8, "layer_types": SLIDING}
    | {"num_local_experts": 4, "num_experts_per_tok": 2}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "mixtral": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": BASE | EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": BASE | EXPERTS | {"head_dim": 16},
    "olmoe": BASE | EXPERTS,
    "granitemoe": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": SMALL | {"state_size": 8},
    "falcon_mamba": SMALL | {"state_size": 8},
    "mamba2": SMALL
    | {"state_size": 16, "head_dim": 16, "num_heads": 8, "n_groups": 1, "chunk_size": 16},
    "jamba": BASE
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
    | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4}
    | {"num_experts_per_tok": 2, "use_mamba_kernels": False},
    "bamba": BASE | MAMBA2 | {"attn_layer_indices": [1, 3]},
    "zamba": SMALL
    | {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    | {"mamba_d_state": 8, "n_mamba_heads": 2, "use_mamba_kernels": False}
    | {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": SMALL
    | {"intermediate_size": 128, "num_attention_heads": 4, "mamba_d_state": 16}
    | {"n_mamba_heads": 8, "mamba_expand": 2, "mamba_ngroups": 1, "chunk_size": 16}
    | {"layers_block_type": ["mamba", "hybrid"] * 2, "use_mamba_kernels": False}
    | {"adapter_rank": 8, "num_mem_blocks": 1},
    "falcon_h1": BASE | MAMBA2 | {"mamba_d_ssm": 128},
    "granitemoehybrid": BASE
    | MAMBA2
    | {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0}
    | {"shared_intermediate_size": 128},
    "granitemoehybrid (experts)": BASE
    | MAMBA2
    | {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "shared_intermediate_size": 128},
    "nemotron_h": BASE
    | {"layers_block_type": ["mamba", "attention", "mamba", "moe"], "head_dim": 16}
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1}
    | {"chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 64}
    | {"moe_shared_expert_intermediate_size": 64, "use_mamba_kernels": False},
    "recurrent_gemma": SMALL
    | {"num_hidden_layers": 6, "intermediate_size": 128, "num_attention_heads": 4}
    | {"lru_width": 64, "attention_window_size": 16, "head_dim": 16, "pad_token_id": 0}
    | {"block_types": ["recurrent", "recurrent", "attention"]},
    "lfm2": BASE | {"layer_types": CONV},
    "lfm2_moe": BASE | EXPERTS | {"layer_types": CONV, "num_dense_layers": 1},
    "lfm3": BASE
    | {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]}
    | {"head_dim": 16, "sliding_window": 8},
    "qwen3_next": BASE
    | LINEAR
    | EXPERTS
    | {"layer_types": HYBRID, "shared_expert_intermediate_size": 64, "head_dim": 16},
    "qwen3_5_text": BASE | LINEAR | {"layer_types": HYBRID, "head_dim": 16},
    "qwen3_5_moe_text": BASE
    | LINEAR
    | EXPERTS
    | {"layer_types": HYBRID, "head_dim": 16, "shared_expert_intermediate_size": 64},
    "qwen4_exp_text": BASE
    | LINEAR
    | EXPERTS
    | {"layer_types": HYBRID, "head_dim": 16, "shared_expert_intermediate_size": 64}
    | {"hc_lowrank": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    | {"indexer_budget": 64, "indexer_compress_ratio": 4},
    "olmo_hybrid": BASE | LINEAR | {"layer_types": HYBRID},
    "kimi_linear": BASE
    | LOCAL_EXPERTS
    | LATENT
    | {"num_key_value_heads": 4, "layer_types": HYBRID}
    | {"linear_head_dim": 16, "linear_num_heads": 4},
    "bailing_hybrid": BASE
    | LOCAL_EXPERTS
    | LATENT
    | {"num_key_value_heads": 4, "layer_types": HYBRID, "head_dim": 16}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "minimax": BASE
    | {"layer_types": HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"block_size": 16, "head_dim": 16},
    "zaya": BASE
    | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 1}
    | {"moe_intermediate_size": 64, "router_hidden_size": 16},
    "rwkv": SMALL | {"attention_hidden_size": 64, "intermediate_size": 128, "context_length": 256},
    "xlstm": SMALL
    | {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 4, "num_heads": 2}
    | {"chunk_size": 16, "mode": "inference", "autocast_kernel_dtype": "float32"},
}
"""Settings of a tiny model per family; a word in parentheses is a variant."""

MARKS = {True: "ok", None: "not offered"}
BEGIN, END = "<!-- table: made by examples/hf_law_table.py -->", "<!-- end of table -->"


def tiny_model(family: str) -> Any:
    """A tiny random model; large weights make the past matter."""
    package = transformers_package()
    torch.manual_seed(0)
    config = package.AutoConfig.for_model(family.split()[0], **FAMILIES[family])
    model = package.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            parameter.data.mul_(5.0)
    return model.eval()


def cells(report: ModelReport) -> tuple[str, ...]:
    """Each kind of call with ``ok``, the largest error, or ``not offered``."""
    cells = []
    for mode in ("generate", "training"):
        cells += [_cell(report, mode, call, safe) for call, safe in report.calls(mode).items()]
    plain = {call: safe for call, safe in report.calls("plain").items() if safe is False}
    worse = [f"{CALLS[call]} {_cell(report, 'plain', call, False)}" for call in plain]
    return (*cells, "; ".join(worse) or "ok")


def rows(reports: list[ModelReport]) -> list[str]:
    """A line of the table for the families that have the same cells."""
    names: dict[tuple[str, ...], list[str]] = {}
    for report in reports:
        names.setdefault(cells(report), []).append(report.name)
    return [f"| {' | '.join([', '.join(same), *given])} |" for given, same in names.items()]


def _cell(report: ModelReport, mode: str, call: str, safe: bool | None) -> str:
    if safe is not False:
        return MARKS[safe]
    wrong = [f for f in report.wrong() if (f.mode, f.call) == (mode, call)]
    measured = [f.error for f in wrong if f.error is not None and "generate" not in f.clause]
    finite = [error for error in measured if error != float("inf")]
    if finite:
        return f"**{max(finite):.1g}**"
    return "**raises**" if measured else "**other tokens**"


def table(reports: list[ModelReport]) -> str:
    """The table in Markdown, under the versions and the date."""
    versions = f"transformers {transformers_package().__version__}, PyTorch {torch.__version__}"
    titles = ["family", *CALLS.values(), "wrong in plain calls"]
    good = sum(report.ok for report in reports)
    generate, packed = (
        sum(False in report.calls(mode).values() for report in reports)
        for mode in ("generate", "training")
    )
    return "\n".join(
        [
            f"{datetime.date.today()}, {versions}; {len(reports)} models, float64, limit "
            f"{LIMITS[torch.float64]:g}. Every offered call is right in {good}; calls as generate "
            f"makes them are wrong in {generate}, and packed rows in {packed}.",
            "",
            f"| {' | '.join(titles)} |",
            "|---" * len(titles) + "|",
            *rows(reports),
        ]
    )


def main() -> None:
    """Check the families and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help=f"by default all: {', '.join(FAMILIES)}")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are too small for threads
    reports = []
    for family in given.families or FAMILIES:
        reports.append(check_model(tiny_model(family), name=family))
        if not given.write:
            print(reports[-1], flush=True)
    made = table(reports)
    if not given.write:
        print(f"\n{made}")
        return
    page = given.write.read_text(encoding="utf-8")
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    new = re.sub(pattern, lambda _: f"{BEGIN}\n\n{made}\n\n{END}", page, flags=re.DOTALL)
    given.write.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
