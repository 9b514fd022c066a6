"""The check of a server: all clauses, and a verdict relative to the server's own noise."""

from collections.abc import Iterable
from itertools import groupby
from math import sqrt
from statistics import median

from stateline.errors import InputError
from stateline.server_check.clauses import BORDERS, Pair, Trial
from stateline.server_check.client import Refused, Server
from stateline.server_check.prompts import Prompts
from stateline.server_check.report import ServerFinding, ServerReport

FLOOR = 1e-3
"""Smallest limit in nats: rounding in float32 changes log-probabilities by far less."""

ABOVE_NOISE = 20
"""The limit is this many times the median difference of all pairs."""

PART_OF_EFFECT = 0.25
"""The limit is at most this part of what another early token changes."""


def check_server(
    url: str,
    model: str | None = None,
    *,
    key: str | None = None,
    borders: Iterable[int] = BORDERS,
    seed: int = 0,
) -> ServerReport:
    """Check that a server gives one answer to a prompt, however it is asked.

    The reference is the likeliest answer to a prompt that is asked alone, and fresh: without states
    that the server keeps. It is compared with repeated prompts, prompts after kept prefixes of
    certain lengths, prompts beside others, branches of conversations, answers in pieces, prompts
    after many others, and the beginning of an answer as a part of the prompt.

    A difference counts if it is above 0.001 nats and above 20 times the median of all differences,
    which is the server's own noise. It always counts if it is above a quarter of what another early
    token changes. If the server gives no log-probabilities, texts are compared: a clause may have
    as many differences as repeated prompts predict, plus one and two standard deviations.

    Args:
        url: Address of OpenAI's interface: ``http://127.0.0.1:8000/v1``.
        model: Name of the model; by default the first that the server names.
        key: Key of the server.
        borders: Lengths of prefixes, in tokens; lengths that the server refuses are left out.
        seed: Seed of the prompts. The server keeps states of the prompts, so use another seed for
            the next check.

    Raises:
        InputError: If the server cannot be reached, or does not answer as OpenAI's do.
    """
    server = Server(url, model, key)
    try:
        trial = Trial(server, Prompts(server, seed), borders)
        effects = trial.effects()
        clauses = [trial.repeated, trial.behind_prefixes, trial.branched, trial.batched]
        clauses += [trial.streamed, trial.continued, trial.evicted]
        pairs = [pair for clause in clauses for pair in clause()]
    except Refused as error:
        raise InputError(f"{url} refused a prompt after it had taken others: {error}") from error
    effect, noise = median(effects), median(pair.distance for pair in pairs)
    if server.log_probs:
        limit = min(max(FLOOR, ABOVE_NOISE * noise), PART_OF_EFFECT * effect)
        conclusive = effect >= 10 * FLOOR
    else:
        repeated = [pair.distance for pair in pairs if pair.clause == "a repeated prompt"]
        limit = noise = sum(repeated) / len(repeated)
        conclusive = effect > 0
    found = [
        _finding(clause, list(group), limit, server.log_probs)
        for clause, group in groupby(pairs, key=lambda pair: pair.clause)
    ]
    notes = list(trial.notes)
    if not server.log_probs:
        notes.append("the server gives no log-probabilities: only texts are compared")
    if not server.isolates:
        notes.append("all requests share kept states: the first answer to a prompt is fresh")
    return ServerReport(
        f"{url} ({server.model})",
        tuple(found),
        noise,
        limit,
        effect,
        server.log_probs,
        server.isolates,
        conclusive,
        tuple(notes),
    )


def _finding(clause: str, pairs: list[Pair], limit: float, log_probs: bool) -> ServerFinding:
    worst, count = max(pairs, key=lambda pair: pair.distance), len(pairs)
    wrong = sum(pair.distance > (limit if log_probs else 0) for pair in pairs)
    allowed = 0.0 if log_probs else 1 + limit * count + 2 * sqrt(count * limit * (1 - limit))
    return ServerFinding(clause, count, wrong, worst.distance, worst.where, wrong <= allowed)
