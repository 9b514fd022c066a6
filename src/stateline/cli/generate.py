"""Continue a prompt with a trained model, token by token, on its state."""

from collections.abc import Sequence

from jsonargparse import ArgumentParser

BYTES = 256
"""Vocabulary of a model of bytes, the only one whose tokens are text by themselves."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", type=str, help="folder of a trained model")
    parser.add_argument(
        "--prompt",
        type=str,
        default="\n",
        help="text; for a model that is not of bytes, token numbers",
    )
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token"
    )
    parser.add_argument(
        "--top_k", type=int | None, default=None, help="only the k likeliest tokens"
    )
    parser.add_argument(
        "--top_p",
        type=float | None,
        default=None,
        help="only the likeliest, up to this probability",
    )
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the continuation as it comes."""
    given = parser.parse_args(arguments)

    import codecs
    import sys

    import torch

    from stateline.errors import InputError
    from stateline.generate import Sampling, stream
    from stateline.models.checkpoint import load_model

    sampling = Sampling(given.temperature, given.top_k, given.top_p)
    model = load_model(given.run)
    of_bytes = model.config.vocab_size == BYTES
    try:
        text = given.prompt.encode(errors="surrogateescape")
        prompt = list(text) if of_bytes else [int(number) for number in text.split()]
        tokens = torch.tensor([prompt], dtype=torch.int64)
    except ValueError as error:  # not a number, or one beyond 64 bits
        raise InputError(
            f"the model in {given.run} has {model.config.vocab_size} tokens, not bytes: give "
            f"the prompt as token numbers, got {given.prompt!r}"
        ) from error
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    if of_bytes:
        sys.stdout.write(decoder.decode(text))
    for token in stream(model, tokens, given.max_new_tokens, sampling=sampling, seed=given.seed):
        number = int(token[0])
        sys.stdout.write(decoder.decode(bytes([number])) if of_bytes else f"{number} ")
        sys.stdout.flush()
    print(decoder.decode(b"", final=True))
    return 0
