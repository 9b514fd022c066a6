"""Clauses: each asks prompts in one way, and compares with the answers asked alone and fresh."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from stateline.server_check.client import Answer, Refused, Server
from stateline.server_check.prompts import Prompts

BORDERS = (15, 16, 17, 527, 528, 529, 8319, 8320, 8321)
"""Lengths of prefixes, in tokens: around the borders of blocks of 16 and of usual chunks."""

TOKENS = 12
"""New tokens of an answer."""

FLOOD = 40, 200
"""Number of prompts, and of tokens in each, that should evict the kept states of a server."""


_HALF = "\ufffd"


class Pair(NamedTuple):
    """Two answers that should be the same, and how far they differ."""

    clause: str
    where: str
    distance: float


class Trial:
    """The prompts of a check, and their answers alone and fresh.

    All fresh answers are asked for first. If no request field turns off the sharing of kept states,
    the server is flooded with other prompts before anything is asked again. ``borders`` are the
    lengths of the prefixes that are asked before longer prompts.
    """

    def __init__(self, server: Server, prompts: Prompts, borders: Iterable[int]) -> None:
        self.server, self.prompts = server, prompts
        self.notes: list[str] = []
        self._fresh: dict[tuple[str, int], Answer] = {}
        self.texts = [prompts.draw(n) for n in (5, 16, 33, 64)]
        self.crowd = [(prompts.draw(3 + 5 * n), 4 + 5 * n % 17) for n in range(16)]
        for text in self.texts:
            self.fresh(text)
        for text, tokens in self.crowd:
            self.fresh(text, tokens)
        self.prefixes: list[tuple[int, str, list[str]]] = []
        for length in borders:
            prefix = prompts.draw(length)
            longer = [prefix + prompts.more(1 + 4 * n) for n in range(2)]
            try:
                for text in longer:
                    self.fresh(text)
            except Refused:
                self.notes.append(f"prompts of {length} tokens and more were refused")
                break
            self.prefixes.append((length, prefix, longer))
        self.branches: list[tuple[str, list[str]]] = []
        for text in self.texts[1:]:
            turn = text + self.fresh(text).text
            leaves = [turn + prompts.more(6) for _ in range(3)]
            try:
                self.branches.append((text, leaves))
                for leaf in leaves:
                    self.fresh(leaf)
            except Refused:
                self.branches.pop()
        if not server.isolates:
            self.flood()

    def fresh(self, text: str, tokens: int = TOKENS) -> Answer:
        """The answer to a prompt, alone and fresh, asked once."""
        if (text, tokens) not in self._fresh:
            self._fresh[text, tokens] = self.server.ask(text, tokens, fresh=True)
        return self._fresh[text, tokens]

    def flood(self) -> None:
        """Ask many other prompts."""
        count, length = FLOOD
        for _ in range(count):
            self.server.ask(self.prompts.draw(length), 1)

    def again(self, clause: str, text: str, where: str) -> Pair:
        """Ask a prompt again, and compare with its fresh answer."""
        return Pair(clause, where, distance(self.server.ask(text, TOKENS), self.fresh(text)))

    def repeated(self) -> Iterator[Pair]:
        """The same prompt three times; the first fills the server's kept states."""
        for text in self.texts:
            for number in range(3):
                where = f"{self.fresh(text).prompt_tokens} tokens, time {number + 1}"
                yield self.again("a repeated prompt", text, where)

    def behind_prefixes(self) -> Iterator[Pair]:
        """A prefix, then two longer prompts, which may continue from its state."""
        for length, prefix, longer in self.prefixes:
            self.server.ask(prefix, 1)
            for text in longer:
                yield self.again("behind a kept prefix", text, f"{length} tokens kept")

    def branched(self) -> Iterator[Pair]:
        """A turn and its answer, then several next turns: together, and one after the other."""
        for text, leaves in self.branches:
            self.server.ask(text, TOKENS)
            where = f"a turn of {self.fresh(text).prompt_tokens} tokens"
            yield from self._together("branches of a conversation", [(x, TOKENS) for x in leaves])
            for leaf in leaves:
                yield self.again("branches of a conversation", leaf, f"after {where}")

    def batched(self) -> Iterator[Pair]:
        """Prompts of many lengths at once, fresh and again."""
        yield from self._together("beside other prompts", self.crowd, fresh=True)
        yield from self._together("beside other prompts", self.crowd)

    def streamed(self) -> Iterator[Pair]:
        """Answers in pieces."""
        for text in self.texts:
            for fresh in (True, False):
                found = self.server.ask(text, TOKENS, fresh=fresh, stream=True)
                gap = distance(found, self.fresh(text))
                yield Pair("streamed", f"{self.fresh(text).prompt_tokens} tokens", gap)

    def continued(self) -> Iterator[Pair]:
        """The beginning of an answer as a part of the prompt: reading and writing agree."""
        for text in self.texts:
            whole = self.fresh(text)
            for count in range(1, len(whole.tokens), 3):
                said = "".join(whole.tokens[:count])
                if not whole.text.startswith(said):
                    break
                found = self.server.ask(text + said, TOKENS - count, fresh=True)
                if found.prompt_tokens != whole.prompt_tokens + count:
                    continue  # the text has other tokens now
                rest = Answer(
                    whole.text[len(said) :], whole.tokens[count:], whole.likely[count:], 0
                )
                yield Pair("own answer as prompt", f"{count} tokens", distance(found, rest))

    def evicted(self) -> Iterator[Pair]:
        """Prompts whose states other prompts have evicted."""
        self.flood()
        for text in self.texts:
            where = f"{self.fresh(text).prompt_tokens} tokens, after others"
            yield self.again("after eviction", text, where)
        for length, _, (text, _) in self.prefixes:
            yield self.again("after eviction", text, f"{length} tokens, after others")

    def effects(self) -> list[float]:
        """The control: how far an answer changes with the first token of its prompt."""
        found = []
        for _ in range(8):
            rest = self.prompts.more(14)
            answers = [
                self.server.ask(self.prompts.draw(2) + rest, TOKENS, fresh=True) for _ in range(2)
            ]
            found.append(distance(*answers))
        return sorted(found)

    def _together(
        self, clause: str, asked: list[tuple[str, int]], *, fresh: bool = False
    ) -> Iterator[Pair]:
        with ThreadPoolExecutor(len(asked)) as pool:
            waiting = [pool.submit(self.server.ask, *one, fresh=fresh) for one in asked]
            answers = [one.result() for one in waiting]
        for (text, tokens), found in zip(asked, answers, strict=True):
            wanted = self.fresh(text, tokens)
            where = f"{wanted.prompt_tokens} tokens, {len(asked)} at once"
            yield Pair(clause, where, distance(found, wanted))


def distance(a: Answer, b: Answer) -> float:
    """How far two answers differ.

    With log-probabilities: their largest difference in nats, up to the first place where the tokens
    differ, since later tokens have another past. So two tokens that are almost equally likely make
    a small difference, whichever was chosen. Without log-probabilities: 1 if the texts differ, else
    0. A trailing U+FFFD, part of a character, does not count: a stream may hold it back.
    """
    same = a.text.rstrip(_HALF) == b.text.rstrip(_HALF)
    if not a.tokens or not b.tokens:
        return float(not same)
    worst = 0.0
    for x, y, likely_a, likely_b in zip(a.tokens, b.tokens, a.likely, b.likely, strict=False):
        worst = max(worst, _gap(x, likely_a, likely_b), _gap(y, likely_b, likely_a))
        if x != y:
            return worst
    return worst if same and len(a.tokens) == len(b.tokens) else float("inf")


def _gap(token: str, mine: dict[str, float], other: dict[str, float]) -> float:
    """Difference of a token's log-probability; a lower bound if the other does not list it."""
    if token in other:
        return abs(mine[token] - other[token])
    return max(0.0, mine[token] - min(other.values()))
