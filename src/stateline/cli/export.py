"""Write a trained model as a folder that Hugging Face transformers reads.

RUN is the folder of a language model, a run or a checkpoint; DST is a new folder, with the weights,
the tokenizer and a model card.
"""

from collections.abc import Sequence
from pathlib import Path

from stateline.cli.options import add_dtype, user_folder
from stateline.cli.parser import Parser
from stateline.devices import resolve_dtype
from stateline.errors import needed


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("run", "folder of a trained model, a run or a checkpoint")
    parser.argument("dst", "folder to write, which must not exist")
    parser.option("max_shard_size", str, "5GB", "largest file of weights, such as 500MB")
    about = "add a file that trust_remote_code=True loads; stateline must still be installed"
    parser.switch("remote_code", about)
    about = "add the code of the model, so that trust_remote_code=True works without stateline"
    parser.switch("self_contained", about)
    add_dtype(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Write the folder, and print what is in it."""
    given = parser.parse_args(arguments)
    user_folder(given.run)
    transformers = needed("transformers", "stateline export", "hf")
    from stateline.hf import export
    from stateline.hf.bundle import CODE
    from stateline.reports.format import short_bytes

    transformers.utils.logging.disable_progress_bar()
    files = export(
        given.run,
        given.dst,
        dtype=resolve_dtype(given.dtype),
        max_shard_size=given.max_shard_size,
        remote_code=given.remote_code,
        self_contained=given.self_contained,
    )
    print(f"wrote {given.dst}: {', '.join(files)}")
    if given.self_contained:
        size = (Path(given.dst) / CODE).stat().st_size
        print(f"{CODE} holds the code of this model, {short_bytes(size)}, for review")
    if "tokenizer.json" not in files:
        print("without a tokenizer: the model reads token numbers")
    return 0
