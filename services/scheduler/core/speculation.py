"""Guess the next tokens of decoding sequences: where the guesses come from, and how many a step takes.

A guess (draft) is what followed the last tokens where they stood before: in the sequence itself, in the output that the
client predicted, or in an output of the same tenant. The worker draws behind each draft and keeps those that equal what
was drawn, so drafts change the time of a token and never the token. Called by the planner, results and ends.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.core.policy.step_time import StepTime
from services.scheduler.core.table import NEVER, SlotTable
from services.scheduler.core.types import NO_ROWS, Int32, Limits, NewRequest, Rows

MAX_ROW_DRAFTS = 16  # drafts of one row in a step
MIN_MATCH = 3  # tokens that stood before as they stand now; fewer predict little
MAX_MATCH = 24  # a longer match is not looked for
MAX_PLACES = 16  # latest places that are compared further
MAX_TENANTS = 64  # with outputs kept: those with the outputs that ended last
TENANT_TOKENS = 16_384  # kept of one tenant, with a GAP behind each output
GAP = -1  # between two outputs
MIN_GAIN = 1.05  # tokens a second with drafts, over those without, from which they are worth a try
ALONE_NS = 1_000_000.0  # between two steps of which the second is planned behind the answer to the first; then learnt
AHEAD_NS = 200_000.0  # between two steps when the second was sent before that
MAX_DELAY_NS = 20e6  # of both; more is a pause of the machine
INITIAL_SHARE = 0.7  # share of drafts that is taken to be right before any was tried
DELAY_RATE = 0.05  # weight of a step in what passes beside steps
SHARE_RATE = 0.25  # weight of a step in a row's share
MAX_SHARE = 0.98  # no share is taken to be more
RECOVERY_RATE = 0.01  # a row that could draft and does not: its share moves back to INITIAL_SHARE by so much a step
MAX_PAUSE = 16  # tokens that a row without a match gets at most before the next search


@dataclass(slots=True)
class Drafts:
    """Guesses of what comes behind the last known token of decoding rows."""

    rows: Rows  # [k] ascending
    counts: Int32  # [k] at least 1
    tokens: Int32  # those of one row after another


class Outputs:
    """The last outputs of one tenant, one after another."""

    def __init__(self) -> None:
        self._tokens: Int32 = np.full(TENANT_TOKENS, GAP, np.int32)
        self._size = 0

    @property
    def tokens(self) -> Int32:
        """Return the tokens, with a GAP behind each output."""
        return self._tokens[: self._size]

    def add(self, output: Int32) -> None:
        """Add an output, its first tokens if it is long; where there is no room the older half goes."""
        half = TENANT_TOKENS // 2
        output = output[: half - 1]
        if self._size + output.size >= TENANT_TOKENS:
            self._size -= half
            self._tokens[: self._size] = self._tokens[half : half + self._size].copy()
        end = self._size + output.size
        self._tokens[self._size : end], self._tokens[end] = output, GAP
        self._size = end + 1


class History:
    """The last outputs by tenant; no tenant's drafts come from another one's. Shared by all replicas.

    drafted, accepted: drafts that were checked, and those that were right.
    """

    def __init__(self) -> None:
        self.drafted = self.accepted = 0
        self._of: OrderedDict[str, Outputs] = OrderedDict()

    def add(self, request: NewRequest, output: Int32) -> None:
        """Keep an output that has ended, for others of its tenant."""
        if output.size <= MIN_MATCH or not request.speculate:
            return
        outputs = self._of.get(request.tenant)
        if outputs is None:
            outputs = self._of[request.tenant] = Outputs()
            if len(self._of) > MAX_TENANTS:
                self._of.popitem(last=False)
        self._of.move_to_end(request.tenant)
        outputs.add(output)

    def find(self, tenant: str, tail: Int32, most: int) -> tuple[int, list[list[int]]]:
        """Return as follow(), from the outputs of a tenant."""
        outputs = self._of.get(tenant)
        return find(outputs.tokens, tail, most) if outputs is not None else (0, [])


def find(text: Int32, tail: Int32, most: int) -> tuple[int, list[list[int]]]:
    """Return as follow(), from wherever the last tokens of `tail` stand in `text` with something behind them."""
    end = text.size - 1
    if end < MIN_MATCH or tail.size < MIN_MATCH:
        return 0, []
    hit = text[MIN_MATCH - 1 : end] == tail[-1]
    for back in range(1, MIN_MATCH):
        hit &= text[MIN_MATCH - 1 - back : end - back] == tail[-1 - back]
    places = hit.nonzero()[0][-MAX_PLACES:] + (MIN_MATCH - 1)
    return follow(text, places, tail, most) if places.size else (0, [])


def follow(text: Int32, places: Rows, tail: Int32, most: int) -> tuple[int, list[list[int]]]:
    """Return the length of the longest match of the end of `tail` at one of `places` in `text`, and what follows.

    places: where the last of MIN_MATCH tokens stands that match, ascending. The second has at most `most` tokens each
    of what follows the places at which at least half as many match.
    """
    length, longest, by_length = MIN_MATCH, places, [places]
    while length < tail.size:
        longest = longest[longest >= length]
        longest = longest[text[longest - length] == tail[-1 - length]]
        if not longest.size:
            break
        length += 1
        by_length.append(longest)
    places = by_length[max(-(-length // 2) - MIN_MATCH, 0)]
    return length, [text[at + 1 : at + 1 + most].tolist() for at in places.tolist()]


def agree(follows: list[list[int]], share: float, least: float) -> tuple[list[int], float]:
    """Return the tokens on which most of `follows`, the latest last, agree, and how many of them are probably right.

    share: chance of a token to be right when all agree. The tokens end where the chance of all so far is below `least`.
    """
    tokens: list[int] = []
    chance, expected = 1.0, 0.0
    while follows := [each for each in follows if len(each) > len(tokens)]:
        counts = Counter(each[len(tokens)] for each in reversed(follows))  # of equally frequent ones the latest
        token, count = counts.most_common(1)[0]
        chance *= share * count / len(follows)
        if chance < least or token == GAP:
            break
        follows = [each for each in follows if each[len(tokens)] == token]
        tokens.append(token)
        expected += chance
    return tokens, expected


class Speculation:
    """The drafts of one replica's rows."""

    def __init__(self, table: SlotTable, limits: Limits, model: StepTime, history: History) -> None:
        self._table = table
        self._limits = limits
        self._model = model
        self._history = history
        self._share: npt.NDArray[np.float64] = np.full(table.slots, INITIAL_SHARE)  # of a row's drafts that were right
        self._misses: Int32 = np.zeros(table.slots, np.int32)  # looks without a match, one after another
        self._next: Int32 = np.zeros(table.slots, np.int32)  # applied tokens from which on a row is looked at again
        self._seen: npt.NDArray[np.int64] = np.full(table.slots, NEVER)  # generation that these are of
        self._alone_ns = ALONE_NS
        self._ahead_ns = AHEAD_NS
        self._answered_ns = 0  # when the last step was answered
        self._waited: Rows = NO_ROWS  # that a step was put off for
        self._patience = 0  # looks of worth_waiting that are left out
        self._failures = 0

    @property
    def possible(self) -> bool:
        """Return whether steps of this replica may have drafts."""
        return self._limits.max_drafts > 0

    def drafts(self, rows: Rows, tokens_left: int, blocks_left: int, context: int) -> Drafts | None:
        """Return drafts for a step of `rows`, their own tokens planned; see propose()."""
        found = self.propose(rows, tokens_left, blocks_left, context)
        if self._waited.size:
            wrong = self._waited if found is None else np.setdiff1d(self._waited, found.rows)
            self._share[wrong] *= 1 - SHARE_RATE  # their first draft was, or they have ended
            self._failures = 0 if found is not None else min(self._failures + 1, 6)
            self._patience = (1 << self._failures) - 1
            self._waited = NO_ROWS
        return found

    def propose(
        self, rows: Rows, tokens_left: int, blocks_left: int, context: int, waiting: bool = False
    ) -> Drafts | None:
        """Return drafts for some of `rows`, all that decode, or None where they would cost more than they give.

        tokens_left, blocks_left: what drafts may take beyond what the rows take without any. context: sum of the rows'
        context lengths. A row that has a step unanswered is judged by the tokens applied so far.

        waiting: the step would be put off until what is unanswered is answered. The answer brings the tokens that the
        first drafts guess, so these bring nothing; and the device stands still both before the step and behind it.
        """
        table, model = self._table, self._model
        if not model.observed or not rows.size:
            return None
        step_ns = model.predict(rows.size, context)
        draft_ns = (model.predict(rows.size + 8, context) - step_ns) / 8 + model.c3 * context / rows.size
        least = self._least(rows.size, step_ns, draft_ns)
        room = min(tokens_left, self._limits.max_drafts, self._affordable(rows, context))
        if least >= 1.0 or room < 1:
            return None
        fresh = rows[self._seen[rows] != table.generation[rows]]
        if fresh.size:
            self._share[fresh], self._misses[fresh], self._next[fresh] = INITIAL_SHARE, 0, 0
            self._seen[fresh] = table.generation[fresh]
        may = (self._next[rows] <= table.applied[rows]) & (table.limit[rows] > table.known[rows])
        due = [row for row in rows[may].tolist() if table.request[row].speculate]
        found: list[tuple[int, list[int]]] = []
        expected, answered = 0.0, 0  # answered: drafts of tokens that the answer brings
        for row in due:
            share = self._share.item(row)
            most = min(MAX_ROW_DRAFTS, room, table.limit.item(row) - table.known.item(row))
            if share < least or most < 1:
                self._share[row] += RECOVERY_RATE * (INITIAL_SHARE - share)
                continue
            follows = self._look(row, most)
            drafts, right = agree(follows, share, least)
            if not drafts:
                self._misses[row] += 1
                self._next[row] = table.applied[row] + min(1 << min(self._misses.item(row), 8), MAX_PAUSE)
                continue
            self._misses[row] = 0
            drafts, blocks_left = self._within(row, drafts, blocks_left)
            unanswered = table.unanswered.item(row) if waiting else 0
            if len(drafts) > unanswered:
                found.append((row, drafts))
                room -= len(drafts) - unanswered
                answered += unanswered
                expected += right - agree([each[:unanswered] for each in follows], share, least)[1]
        if not found:
            return None
        counts = np.array([len(drafts) for _, drafts in found], np.int32)
        plain = step_ns + min(self._ahead_ns, self._alone_ns)
        took = step_ns + draft_ns * (int(counts.sum()) - answered) + self._alone_ns
        if waiting:
            took += max(self._alone_ns - self._ahead_ns, 0.0)
        if (rows.size + expected) * plain < MIN_GAIN * rows.size * took:
            tried = [row for row, _ in found]
            self._share[tried] += RECOVERY_RATE * (INITIAL_SHARE - self._share[tried])
            return None
        tokens = [token for _, drafts in found for token in drafts]
        return Drafts(np.array([row for row, _ in found]), counts, np.array(tokens, np.int32))

    def worth_waiting(self, rows: Rows, tokens_left: int, context: int) -> bool:
        """Return whether `rows`, some with a step unanswered, should have drafts behind its answer and no step now.

        If the answer is another than the drafts say, the device has waited for nothing; so the next such look waits.
        """
        if self._patience:
            self._patience -= 1
            return False
        drafts = self.propose(rows, tokens_left, self._limits.blocks, context, waiting=True)
        if drafts is None:
            return False
        self._waited = drafts.rows
        return True

    def answered(self, planned_ns: int, step_ns: int, now_ns: int, alone: bool) -> None:
        """Learn what passes beside the steps, from a step that took `step_ns` at the worker and is answered now.

        alone: it was planned when no other was unanswered.
        """
        since_ns, self._answered_ns = planned_ns if alone else max(planned_ns, self._answered_ns), now_ns
        beside_ns = min(max(now_ns - since_ns - step_ns, 0), MAX_DELAY_NS)
        if step_ns <= 0:
            return
        if alone:
            self._alone_ns += DELAY_RATE * (beside_ns - self._alone_ns)
        else:
            self._ahead_ns += DELAY_RATE * (beside_ns - self._ahead_ns)

    def learn(self, rows: Rows, drafts: Int32, right: Int32) -> None:
        """Learn from an answer: right[i] of drafts[i] guesses for rows[i] were right, [k] each."""
        tried = np.minimum(right + 1, drafts)
        share = self._share[rows]
        self._share[rows] = (share + SHARE_RATE * (right / np.maximum(tried, 1) - share)).clip(0.01, MAX_SHARE)
        self._history.drafted += int(drafts.sum())
        self._history.accepted += int(right.sum())

    @staticmethod
    def _least(rows: int, step_ns: float, draft_ns: float) -> float:
        """Return the chance of being right from which a draft brings more tokens a second than it costs."""
        return max(draft_ns * rows / max(step_ns, 1.0), 0.02)

    def _affordable(self, rows: Rows, context: int) -> int:
        """Return the draft tokens beside `rows` with which no declared limit of the time between tokens is passed."""
        table = self._table
        if not table.limited:
            return self._limits.max_drafts
        limits = table.tbt_slo_ns[rows]
        limits = limits[limits > 0]
        if not limits.size:
            return self._limits.max_drafts
        limit_ns = float(limits.min()) / (1 + self._model.error)
        return self._model.largest(limit_ns, rows.size, context, context // rows.size)

    def _look(self, row: int, most: int) -> list[list[int]]:
        """Return what followed the last applied tokens of a row where they stood before."""
        table, request = self._table, self._table.request[row]
        text = table.tokens[row, : table.applied.item(row)]
        tail = text[-MAX_MATCH:]
        length, best = find(text, tail, most)
        # A match may reach to the end: what repeats itself may go on.
        best = [(each * most)[:most] if len(each) < most else each for each in best]
        if request.prediction.size:
            longer, follows = find(request.prediction, tail, most)
            if longer >= length and longer:  # what the client says goes before what the sequence says
                length, best = longer, follows
        if length < MAX_MATCH:
            longer, follows = self._history.find(request.tenant, tail, most)
            if longer > length:
                best = follows
        return best

    def _within(self, row: int, drafts: list[int], blocks_left: int) -> tuple[list[int], int]:
        """Return as many of the drafts as blocks allow, and the blocks that are left."""
        size, planned, held = self._limits.block_size, self._table.planned.item(row), self._table.held.item(row)
        more = max(-(-(planned + len(drafts)) // size) - held, 0)
        if more > blocks_left:
            more = blocks_left
            drafts = drafts[: (held + more) * size - planned]
        return drafts, blocks_left - more
