"""The option that limits the costs of the models that a report decides on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

if TYPE_CHECKING:
    from stateline.reports.decision import Budget


def add_budget_option(parser: ArgumentParser) -> None:
    """Add ``--budget``; pass its value to :func:`read_budgets`."""
    parser.add_argument(
        "--budget",
        nargs="+",
        type=str,
        default=[],
        metavar="LIMIT",
        help="decide among models within limits on state, flops, decode, prefill or train, such as "
        '"state<=64KiB" "decode>=1k", or "state@4096<=64KiB" at a length',
    )


def read_budgets(texts: Sequence[str]) -> "list[Budget]":
    """The limits that were given.

    Raises:
        InputError: If one is malformed.
    """
    from stateline.reports.decision import read_budget

    return [read_budget(text) for text in texts]
