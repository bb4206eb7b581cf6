"""Look-up drafter: the text that followed the same tokens before is proposed again.

Answers quote their prompt, edit it and repeat themselves. The drafter finds an earlier place whose last tokens are those of the
text now, and proposes the tokens that followed there (prompt look-up). SAM-Decoding (arXiv 2411.10666) uses a suffix automaton
for it. Here the places of every `GRAM` tokens form chains, as in LZ77's encoders. The longest of `MAX_TRIED` matches is found in
bounded time for each token, and a place that is cut off is unlinked again, which an automaton cannot do.

An edited copy leaves its source and comes back. So after a wrong prediction places up to `NEAR` tokens behind it are tried with a
match of one or two tokens, or as if one token had been replaced. Once the copy follows its source again, the tokens that replaced
others are remembered: the same edit is proposed where the same tokens come again. At the beginning of an answer one token is
enough, at its first place in the prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from swarmnode.serving.drafting.drafter import Weighed

GRAM = 2  # tokens that name a place
MAX_TRIED = 16  # places compared for a match, the latest first
MAX_MATCH = 32  # tokens compared at a place
COPIED = 8  # tokens of a match that count as a copy, which may be followed again
RETURNED = 3  # tokens of a match that shows that a copy is followed again
NEAR = 48  # tokens after the place of an edit: the source goes on there
MAX_TOKENS = 1 << 16  # remembered; the older half is forgotten when there are more
TOKEN_BYTES = 176  # of memory for each remembered token, measured: the text, its chain and an entry of the table
LEAST_LIKELY = 0.1  # of a proposed token, by the matches that held before
LEARNT = 64  # judged predictions after which older ones count half
MAX_LEARNING = 64  # tokens of one `push`: more are a prompt, whose own repetitions say little about the answer
SEPARATOR = -1  # between texts; no token
MAX_EDIT, MAX_EDITS = 16, 256  # tokens of a remembered edit, and edits


class MatchKind(Enum):
    """Kind of predictions, whose shares of right ones are counted together. The value is the share that is expected at first."""

    FIRST = 0.5  # one token matches at its first place in the prompt, and nothing has matched yet
    REPLACED = 0.3  # the source goes on as if one token had been replaced
    NEAR_ONE = 0.4  # one token matches near the place of an edit
    NEAR_TWO = 0.6
    EDIT = 0.7  # a remembered edit
    SHORT = 0.65  # fewer than 4 tokens match
    MEDIUM = 0.8  # fewer than 8
    LONG = 0.9  # fewer than 16
    LONGEST = 0.97


class Match(NamedTuple):
    """Place in the text whose tokens may come next.

    `pending` tokens of a remembered edit come first, then the one at `source`. `length` tokens before it are alike. `near` means
    that these are few, and that the place counts because it is close to an edit; `first`, that it counts as the first place of the
    last token in the prompt. `followed` of the tokens were predicted.
    """

    source: int
    length: int
    near: bool = False
    pending: tuple[int, ...] = ()
    followed: int = 0
    first: bool = False

    @property
    def kind(self) -> MatchKind:
        """Kind of this match's prediction."""
        if self.pending:
            return MatchKind.EDIT
        if self.first:
            return MatchKind.FIRST
        if self.near:
            return (MatchKind.REPLACED, MatchKind.NEAR_ONE, MatchKind.NEAR_TWO)[min(self.length, 2)]
        return (MatchKind.SHORT, MatchKind.SHORT, MatchKind.SHORT, MatchKind.MEDIUM, MatchKind.LONG, MatchKind.LONGEST)[
            min(self.length, 16).bit_length()
        ]

    def moved(self) -> Match:
        """Return the match behind the predicted token."""
        if self.pending:
            return self._replace(pending=self.pending[1:], length=self.length + 1)
        length = self.length + 1
        return Match(self.source + 1, length, self.near and length < GRAM, followed=self.followed + 1)


class LookupDrafter:
    """Drafter that proposes what followed the last tokens earlier in the text, or in `earlier` texts of the same owner.

    It counts how often matches of each length were right, and proposes only tokens that are likely by this count.
    """

    name = "lookup"

    def __init__(self, earlier: Sequence[Sequence[int]] = (), *, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max(max_tokens, 2 * MAX_MATCH)
        self._text = array("q")
        self._before = array(
            "q"
        )  # for each length of the text, the latest earlier place of its last GRAM tokens, or -1
        self._places: dict[int, int] = {}  # by the hash of GRAM tokens, the latest place after them
        self._forgotten = 0  # tokens that were dropped from the beginning
        self._match: Match | None = None  # for the end of the text
        self._left: tuple[int, int] | None = (
            None  # of the last edit: the place that was left, and where the text was then
        )
        self._edits: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # by the first replaced token
        self._matched = False  # whether a prediction was right since the prompt
        self._judged = {kind: (kind.value, 1.0) for kind in MatchKind}  # right predictions, and all
        for text in earlier:
            self._index([*text, SEPARATOR])
        self._begin = len(self._text)

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the remembered tokens take."""
        return len(self._text) * TOKEN_BYTES

    def push(self, ids: Sequence[int]) -> None:
        """Append accepted tokens to the text; the prompt comes first."""
        if len(ids) > MAX_LEARNING:
            self._match, self._left, self._matched = None, None, False
            self._index(ids)
        else:
            for token in ids:
                self._follow(token)
        if len(self._text) > self._max_tokens:
            kept = self._text[len(self._text) - self._max_tokens // 2 :]
            self._forgotten += len(self._text) - len(kept)
            self._text, self._before, self._places = array("q"), array("q"), {}
            self._index(kept)
            self._match, self._left = None, None
        if self._match is None:
            self._match = self._find(())

    def cut(self, length: int) -> None:
        """Forget all but the first `length` accepted tokens."""
        while len(self._text) > max(0, self._begin + length - self._forgotten):
            # The last token's place leaves its chain.
            end, before = len(self._text), self._before.pop()
            if end >= GRAM:
                name = self._name(end)
                if before < 0:
                    del self._places[name]
                else:
                    self._places[name] = before
            self._text.pop()
        self._forgotten = min(self._forgotten, self._begin + length)
        self._left = None
        self._match = self._find(())

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that may follow the accepted tokens and then `guessed`; none if no match is likely."""
        return [guess.id for guess in self.weigh(guessed, count)]

    def weigh(self, guessed: Sequence[int], count: int) -> list[Weighed]:
        """Return what `propose` would return, each guess with the probability that it and all before it are right, also those in
        flight."""
        match, likely, ahead = self._match, 1.0, list[int]()
        for token in guessed:
            predicted = None if match is None else self._predicted(match, ahead)
            ahead.append(token)
            if predicted is not None and self._token(predicted, ahead) == token:
                likely *= self._held(predicted)
                match = predicted.moved()
            else:
                match, likely = self._find(ahead), 1.0
        weighed: list[Weighed] = []
        while match is not None and len(weighed) < count:
            match = self._predicted(match, ahead)
            token = self._token(match, ahead)
            likely *= self._held(match)
            if likely < LEAST_LIKELY or token < 0:
                break
            ahead.append(token)
            weighed.append(Weighed(token, likely))
            match = match.moved()
        return weighed

    # -- the text and its places

    def _index(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._text.append(token)
            end = len(self._text)
            if end < GRAM:
                self._before.append(-1)
                continue
            name = self._name(end)
            self._before.append(self._places.get(name, -1))
            self._places[name] = end

    def _name(self, end: int) -> int:
        return hash(tuple(self._text[end - GRAM : end]))

    def _at(self, place: int, ahead: Sequence[int]) -> int:
        """Return the token at a place of the text and then `ahead`; SEPARATOR behind both."""
        if place < len(self._text):
            return self._text[place]
        place -= len(self._text)
        return ahead[place] if place < len(ahead) else SEPARATOR

    def _token(self, match: Match, ahead: Sequence[int]) -> int:
        """Return the token that comes next by `match`; SEPARATOR if its place has none."""
        return match.pending[0] if match.pending else self._at(match.source, ahead)

    def _predicted(self, match: Match, ahead: Sequence[int]) -> Match:
        """Return `match` with the remembered edit of the tokens at its place, if there is one."""
        if match.pending or match.near:
            return match
        replaced, instead = self._edits.get(self._at(match.source, ahead), ((), ()))
        source = match.source + len(replaced)
        if not replaced or tuple(self._text[match.source : source]) != replaced:
            return match
        return Match(source, match.length, pending=instead)

    # -- matches

    def _follow(self, token: int) -> None:
        """Append one accepted token, and judge the prediction for it."""
        match, before = self._match and self._predicted(self._match, ()), len(self._text)
        self._index((token,))
        if match is not None:
            right = self._token(match, ()) == token
            rights, count = self._judged[match.kind]
            if count >= LEARNT:
                rights, count = rights / 2, count / 2
            self._judged[match.kind] = rights + right, count + 1
            if right:
                self._matched = True
                self._match = match.moved()
                self._record_return(self._match)
                return
            if match.pending:
                self._edits = {first: edit for first, edit in self._edits.items() if edit[1] != match.pending}
            if not match.near and (self._left is None or match.length >= COPIED):
                self._left = (match.source, before)
        if self._left is not None and before - self._left[1] > NEAR:
            self._left = None
        self._match = self._find(())
        self._record_return(self._match)

    def _record_return(self, match: Match | None) -> None:
        """Remember the edit that has ended, if `match` shows that the text follows its source again."""
        if match is None or match.near or match.pending or self._left is None:
            return
        if max(match.length, match.followed + 1) < RETURNED or not self._is_near(match.source):
            return
        (left, since), self._left = self._left, None
        end = len(self._text)
        length = min(self._alike(match.source, self._text[since:]), match.source - left)
        replaced = tuple(self._text[left : match.source - length])
        instead = tuple(self._text[since : end - length])
        if 0 < len(replaced) <= MAX_EDIT and 0 < len(instead) <= MAX_EDIT and len(self._edits) < MAX_EDITS:
            self._edits[replaced[0]] = (replaced, instead)

    def _held(self, match: Match) -> float:
        rights, count = self._judged[match.kind]
        return rights / count

    def _find(self, ahead: Sequence[int]) -> Match | None:
        """Return the longest match of the last tokens of the text and then `ahead`; None if nothing matches."""
        end = len(self._text) + len(ahead)
        tail = [self._at(place, ahead) for place in range(max(0, end - MAX_MATCH), end)]
        best: Match | None = None
        if len(tail) >= GRAM:
            place = self._places.get(hash(tuple(tail[-GRAM:])), -1)
            for _ in range(MAX_TRIED):
                if place < 0:
                    break
                length = self._alike(place, tail) if place < end else 0
                if length >= GRAM and (best is None or self._is_better(Match(place, length), best)):
                    best = Match(place, length)
                place = self._before[place - 1]
        near = None if best is not None and best.length >= 4 else self._find_near(tail)
        found = [match for match in (best, near) if match is not None]
        return max(found, key=self._held, default=None) or self._find_first(tail)

    def _is_better(self, match: Match, other: Match) -> bool:
        """Return whether `match` is longer, or as long and next to the place of the last edit while the other is not."""
        return match.length > other.length or (
            match.length == other.length and self._is_near(match.source) and not self._is_near(other.source)
        )

    def _is_near(self, place: int) -> bool:
        return self._left is not None and self._left[0] <= place <= self._left[0] + NEAR

    def _find_near(self, tail: Sequence[int]) -> Match | None:
        """Return the first match of one or two tokens after the place of the last edit, else one as if a token had been replaced
        there; None if nothing was edited, or long ago."""
        if self._left is None:
            return None
        left, since = self._left
        best = Match(left + 1, 0, near=True) if len(self._text) == since + 1 else None
        for place in range(left, min(left + NEAR, len(self._text) - 1)):
            if (length := min(2, self._alike(place, tail))) > (best.length if best else 0):
                best = Match(place, length, near=True)
        return best

    def _find_first(self, tail: Sequence[int]) -> Match | None:
        """Return a match of one token at its first place in the prompt, as long as the answer has matched nothing: a copy begins at
        the beginning. None if the token is not there."""
        if self._matched or not tail or tail[-1] < 0:
            return None
        try:
            return Match(self._text.index(tail[-1], self._begin, len(self._text) - 1) + 1, 1, near=True, first=True)
        except ValueError:
            return None

    def _alike(self, place: int, tail: Sequence[int] | array[int]) -> int:
        """Return how many tokens before `place` are those at the end of `tail`."""
        length = 0
        while length < min(place, len(tail)) and self._text[place - 1 - length] == tail[-1 - length] >= 0:
            length += 1
        return length
