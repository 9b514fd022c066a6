"""Read a prompt once, fork the state, and keep one of the branches in a file.

Run it: python examples/fork_a_state.py
"""

import tempfile
from pathlib import Path

import torch

from stateline import (
    LanguageModel,
    ModelConfig,
    cat_states,
    load_state,
    nbytes,
    save_state,
    select_rows,
)

PROMPT = "The state is a value: "


def main() -> None:
    """Read a prompt; fork, save, load and join states."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3 attention(position=rope)", vocab_size=256)).eval()
    prompt = torch.tensor([list(PROMPT.encode())])
    with torch.inference_mode():
        _, past = model.forward_chunk(prompt, model.init_state(batch_size=1))
        print(f"{prompt.shape[1]} tokens read, {nbytes(past):,} bytes of state")

        first_letters = torch.tensor([ord("A"), ord("B"), ord("C")])
        logits, futures = model.step(first_letters, select_rows(past, [0, 0, 0]))
        print(f"{len(logits)} futures, {nbytes(futures):,} bytes; the past is as it was")

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "branch.safetensors"
            save_state(file, select_rows(futures, [1]), model)
            branch = load_state(file, model)
        together = cat_states([branch, past])  # one row is a token older than the other
        same_token = torch.tensor([ord("!"), ord("!")])
        both, _ = model.step(same_token, together)
        alone, _ = model.step(same_token[:1], branch)
        same = torch.allclose(both[:1], alone, atol=1e-5)
        print(f"joined with a younger state, the branch goes on as alone: {same}")


if __name__ == "__main__":
    main()
