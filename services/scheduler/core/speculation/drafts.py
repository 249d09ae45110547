"""Guess the next tokens of decoding sequences: what a row has as guesses, and how many of them a step takes.

A guess (draft) is the text that the sequence's grammar forces, as the worker tells it, or what followed the last tokens
where they stood before: in the sequence itself, in the output that the client predicted, or in an output of the same
tenant (texts.py). The worker draws behind each draft and keeps those that equal what was drawn, so drafts change the
time of a token and never the token. Called by the planner, results and ends. Columns over rows; a row is searched for
again only when what was found is used up or another token was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from services.scheduler.core.ngrams import (
    FOLLOWS,
    MAX_MATCH,
    Float32,
    NgramIndex,
    Places,
)
from services.scheduler.core.policy.step_time import UNBOUNDED, StepTime
from services.scheduler.core.speculation.texts import INITIAL_SHARE, History, Predictions
from services.scheduler.core.table import NEVER, SlotTable, ramp
from services.scheduler.core.types import NO_ROWS, Int32, Limits, NewRequest, Rows

MAX_ROW_DRAFTS = 16  # drafts of one row in a step
MIN_GAIN = 1.05  # tokens a second with drafts, over those without, from which they are worth a try
MIN_TENANT_GAIN = 0.9  # the same of each tenant, where several share the steps
ALONE_NS = 1_000_000.0  # between two steps of which the second is planned behind the answer to the first; then learnt
AHEAD_NS = 200_000.0  # between two steps when the second was sent before that
MAX_DELAY_NS = 20e6  # of both; more is a pause of the machine
FORCED_SHARE = 0.95  # the same of forced ones: their text may come in other tokens
DELAY_RATE = 0.05  # weight of a step in what passes beside steps
PACE_RATE = 0.1  # weight of a step in the mean tokens of a row in steps with drafts
SHARE_RATE = 0.25  # weight of a step in a row's share
TENANT_RATE = 0.1  # weight of an ended request's share in its tenant's
MIN_SHARE, MAX_SHARE = 0.01, 0.98  # no share is taken to be less, or more
RECOVERY_RATE = 0.01  # a row that does without forced drafts: their share moves back to FORCED_SHARE by so much a step
WATCH = np.array([4, 4, 16])  # looks for drafts from one look at a row that is trusted too little to the next
MAX_PAUSE = 16  # tokens that a row without a match gets at most before the next search; looks left out at most
PATIENCE = 4  # looks in vain for each one that is left out behind the next
ROWS_A_PAUSE = 4  # rows for each look that is left out at most
TRUSTED_SHARE = 0.5  # share from which a row that begins ends a pause of the looks

_DRAFTS: npt.NDArray[np.float64] = np.arange(1.0, MAX_ROW_DRAFTS + 1)  # of a row
_AHEAD: npt.NDArray[np.int64] = np.arange(MAX_ROW_DRAFTS + 1)


@dataclass(slots=True)
class Drafts:
    """Guesses of what comes behind the last known token of decoding rows."""

    rows: Rows  # [k] ascending
    counts: Int32  # [k] at least 1
    tokens: Int32  # those of one row after another


@dataclass(slots=True)
class Pauses:
    """The looks for drafts of one microbatch that are left out."""

    looks_left: int = 0
    looks: int = 0  # of late that led to no draft
    waits: int = 0  # for an answer behind which no draft was left, one after another
    delayed_rows: Rows = field(default_factory=lambda: NO_ROWS)  # that a step is put off for

    def after_look(self, rows: int, is_found: bool) -> None:
        """Leave out the more looks, the more before this one, at `rows` rows, led to nothing.

        A look takes the scheduler about as long however many rows it finds nothing for, and drafts of many rows are
        seldom worth their cost.
        """
        looks = self.looks // PATIENCE if is_found else self.looks + 1
        self.looks = min(looks, PATIENCE * min(rows // ROWS_A_PAUSE, MAX_PAUSE))
        self.looks_left = 0 if is_found else self.looks // PATIENCE

    def after_wait(self, is_found: bool) -> None:
        """Leave out 1, 3, 7, ... looks after waits in vain, as the device stood still."""
        self.waits = 0 if is_found else min(self.waits + 1, 6)
        self.looks_left = (1 << self.waits) - 1
        if is_found:
            self.looks //= PATIENCE


class Speculation:
    """The drafts of one replica's rows."""

    def __init__(self, table: SlotTable, limits: Limits, model: StepTime, history: History) -> None:
        self._table = table
        self._limits = limits
        self._model = model
        self._history = history
        slots = table.slots
        self._share: npt.NDArray[np.float64] = np.full(slots, INITIAL_SHARE)  # of a row's drafts that were right
        self._forced_share: npt.NDArray[np.float64] = np.full(slots, FORCED_SHARE)  # the same of forced ones
        self._misses: Int32 = np.zeros(slots, np.int32)  # searches without a match, one after another
        self._next_search: Int32 = np.zeros(slots, np.int32)  # applied tokens from which on a row is searched for again
        self._generations: npt.NDArray[np.int64] = np.full(slots, NEVER)  # generation that these are of
        self._may_draft: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)  # the request may have drafts
        self._has_prediction: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._index = NgramIndex(table.tokens_flat, slots, table.width)
        self._predictions: Predictions | None = None
        # What probably comes behind the first _upto tokens; the row's last columns are never set.
        self._follows: Int32 = np.zeros((slots, FOLLOWS + MAX_ROW_DRAFTS + 1), np.int32)
        self._at: Int32 = np.zeros(slots, np.int32)  # of these, the first behind the _upto tokens
        self._size: Int32 = np.zeros(slots, np.int32)  # of these
        self._forced_counts: Int32 = np.zeros(slots, np.int32)  # of these, the first ones that a grammar forces
        self._has_forced = False  # a row had some
        # As NgramIndex.follow has them, behind the 0.0 of no token.
        self._shares: Float32 = np.zeros((slots, 1 + FOLLOWS + MAX_ROW_DRAFTS), np.float32)
        self._shares[:, 1 + FOLLOWS :] = -np.inf
        # [row, i] those from the i-th on.
        self._follows_from: Int32 = sliding_window_view(self._follows, MAX_ROW_DRAFTS + 1, axis=1)
        self._shares_from: Float32 = sliding_window_view(self._shares, 1 + MAX_ROW_DRAFTS, axis=1)
        self._upto: Int32 = np.zeros(slots, np.int32)  # applied tokens
        # Applied tokens up to the last ones that a step had as drafts.
        self._checked_tokens: Int32 = np.zeros(slots, np.int32)
        self._alone_ns = ALONE_NS
        self._ahead_ns = AHEAD_NS
        self._answered_ns = 0  # when the last step was answered
        self._looks = 0
        self._pauses_of: dict[int, Pauses] = {}  # by microbatch
        # Mean tokens of a row in steps in which any row had drafts, the latest count most.
        self._pace: npt.NDArray[np.float64] = np.ones(slots)
        self._watches: npt.NDArray[np.int64] = np.zeros(slots, np.int64)  # of a row that is trusted too little
        self._watch_at: npt.NDArray[np.int64] = np.zeros(slots, np.int64)  # the look from which on the next one is due

    @property
    def possible(self) -> bool:
        """Return whether steps of this replica may have drafts."""
        return self._limits.max_drafts > 0

    def drafts(
        self, rows: Rows, tokens_left: int, blocks_left: int, context: int, prompts: int = 0, microbatch: int = 0
    ) -> Drafts | None:
        """Return drafts for a step of `rows`, their own tokens planned, unless looks pause; see propose()."""
        pauses = self._pauses_of.setdefault(microbatch, Pauses())
        waited = pauses.delayed_rows
        if not waited.size and self._is_left_out(rows, pauses):
            return None
        found = self.propose(rows, tokens_left, blocks_left, context, prompts=prompts)
        if found is not None:
            self._pace[rows] += PACE_RATE * (1.0 - self._pace[rows])  # and what is right of the drafts: learn()
        if waited.size and not prompts:  # which may have left no room
            wrong = waited if found is None else np.setdiff1d(waited, found.rows)
            self._share[wrong] *= 1 - SHARE_RATE  # their first draft was, or they have ended
            pauses.after_wait(found is not None)
        elif found is not None or not prompts:
            pauses.after_look(rows.size, found is not None)
        pauses.delayed_rows = NO_ROWS
        return found

    def propose(
        self, rows: Rows, tokens_left: int, blocks_left: int, context: int, waiting: bool = False, prompts: int = 0
    ) -> Drafts | None:
        """Return drafts for some of `rows`, all that decode, or None where they would cost more than they give.

        tokens_left, blocks_left: what drafts may take beyond what the rows take without any. context: sum of the rows'
        context lengths. prompts: tokens of them in the step. A row that has a step unanswered is judged by the tokens
        applied so far.

        waiting: the step would be put off until what is unanswered is answered. The answer brings the tokens that the
        first drafts guess, so these bring nothing; and the device stands still both before the step and behind it.
        """
        table, model = self._table, self._model
        if not model.observations or not rows.size:
            return None
        total, every = rows.size, table.rows(rows)
        if np.count_nonzero(new := self._generations[every] != table.generation[every]):
            self._begin(rows[new])
        self._looks += 1
        due = self._next_search[every] <= table.applied_tokens[every]
        may = (self._size[every] > self._at[every]) | due
        may &= self._may_draft[every]
        if not np.count_nonzero(may):  # as in most steps of texts that do not repeat themselves
            return None
        step_ns = model.predict(rows.size, context)
        draft_ns = (model.predict(rows.size + 8, context) - step_ns) / 8 + model.c3 * context / rows.size
        least = min_chance(rows.size, step_ns, draft_ns)
        room = min(tokens_left, self._limits.max_drafts, self._affordable(rows, context) - prompts)
        if least >= 1.0 or room < 1:
            return None
        left = table.limit[every] - table.known_tokens[every]
        may &= left > 0
        share = self._first_share(rows)
        timid = may & (share < least)
        if np.count_nonzero(timid):
            self._watch(rows, timid, every)
            may &= ~timid
        which = may.nonzero()[0]
        if not which.size:
            return None
        if which.size < total:
            rows, share, left = rows[which], share[which], left[which]
        which = self._ready(rows, share, least).nonzero()[0]
        if not which.size:
            return None
        if which.size < rows.size:
            rows, left = rows[which], left[which]
        chances = self._chances(rows)
        counts = np.minimum((chances >= np.log(least)).sum(axis=1, dtype=np.int32), left)
        unanswered = table.unanswered_steps[rows] if waiting else np.zeros(rows.size, np.int32)
        if waiting:
            counts[counts <= unanswered] = 0
        plain_ns = step_ns + min(self._ahead_ns, self._alone_ns)
        base_ns = step_ns + self._alone_ns
        if waiting:
            base_ns += max(self._alone_ns - self._ahead_ns, 0.0)
        counts = self._within(rows, level(counts, room), blocks_left)
        slowest = self._slowest(every, rows, counts, unanswered, chances)
        if slowest < UNBOUNDED:
            free = int(np.minimum(counts, unanswered).sum())  # the answer brings tokens without a row
            for tokens in (slowest, 1.0):  # the latter where drafts of the slowest tenant are among those that go
                longer_ns = max(tokens * plain_ns / MIN_TENANT_GAIN - base_ns, 0.0)
                fewer = level(counts, free + int(min(longer_ns / max(draft_ns, 1.0), UNBOUNDED)))
                if self._slowest(every, rows, fewer, unanswered, chances) >= tokens:
                    break
            counts = fewer
        some = counts > unanswered
        if not some.all():
            rows, counts = rows[some], counts[some]
            unanswered, chances = unanswered[some], chances[some]
            if not rows.size:
                return None
        gains = self._gains(counts, unanswered)
        expected = float(np.exp(chances[gains]).sum())
        took_ns = base_ns + draft_ns * np.count_nonzero(gains)
        if (total + expected) * plain_ns < MIN_GAIN * total * took_ns:
            return None
        return Drafts(rows, counts, self._follows_from[rows, self._at[rows], :-1][_AHEAD[:-1] < counts[:, None]])

    @staticmethod
    def _gains(counts: Int32, unanswered: Int32) -> npt.NDArray[np.bool_]:
        """Return [k, MAX_ROW_DRAFTS] which drafts of rows bring a token that no answer brings already."""
        return (_AHEAD[:-1] < counts[:, None]) & (_AHEAD[:-1] >= unanswered[:, None])

    def _slowest(self, every: Rows | slice, rows: Rows, counts: Int32, unanswered: Int32, chances: Float32) -> float:
        """Return the mean tokens of a row, of the tenant with the fewest; UNBOUNDED of one tenant.

        A tenant has those of this step or, if they were more, those of its last ones: its rows seldom have drafts in
        the same step. every: all rows of the step; rows, [k]: those with counts[i] drafts.
        """
        tenants = self._table.tenant[every]
        if (tenants == tenants[0]).all():
            return UNBOUNDED
        drafted = np.zeros(self._table.slots)
        drafted[rows] = (np.exp(chances) * self._gains(counts, unanswered)).sum(axis=1)
        _, each = np.unique(tenants, return_inverse=True)
        tokens = np.maximum(np.bincount(each, 1.0 + drafted[every]), np.bincount(each, self._pace[every]))
        return float((tokens / np.bincount(each)).min())

    def worth_waiting(self, rows: Rows, tokens_left: int, context: int, microbatch: int = 0) -> bool:
        """Return whether `rows`, some with a step unanswered, should have drafts behind its answer and no step now.

        If the answer is another than the drafts say, the device has waited for nothing; then looks pause.
        """
        pauses = self._pauses_of.setdefault(microbatch, Pauses())
        pauses.delayed_rows = NO_ROWS
        if self._is_left_out(rows, pauses):
            return False
        drafts = self.propose(rows, tokens_left, self._limits.blocks, context, waiting=True)
        if drafts is None:
            pauses.after_look(rows.size, False)
            return False
        pauses.delayed_rows = drafts.rows
        return True

    def on_answer(self, planned_ns: int, step_ns: int, now_ns: int, alone: bool) -> None:
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
        """Learn from an answer, its tokens applied: right[i] of drafts[i] guesses of rows[i] brought a token, [k] each.

        The guess behind these was wrong, or it was right and its row had no mask.
        """
        table, at = self._table, self._at[rows]
        last = table.tokens_flat[table.base[rows] + table.applied_tokens[rows] - 1]
        unmasked = (right < drafts) & (last == self._follows_from[rows, at, right])
        self._judge_both(rows, right + unmasked, np.minimum(right + 1, drafts), at)
        self._checked_tokens[rows] = table.applied_tokens[rows]
        self._pace[rows] += PACE_RATE * right
        self._history.drafted_tokens += int(drafts.sum())
        self._history.accepted_tokens += int(right.sum())

    def on_end(self, row: int) -> None:
        """Let the next requests of its tenant begin with what a row has learned that is released now.

        Those with a prediction by the client are no measure of the others.
        """
        table = self._table
        if not self._may_draft[row] or self._has_prediction[row] or self._generations[row] != table.generation[row]:
            return
        self._advance(np.array([row]))
        request: NewRequest = table.request[row]
        self._history.learn(request.tenant, float(self._share[row]), TENANT_RATE / (request.n * len(request.prompts)))

    def force(self, rows: Rows, counts: Int32, tokens: Int32) -> None:
        """Take counts[i] tokens, those of one row after another, as what comes behind the applied ones of rows[i].

        What was found for a row goes on behind them where it says the same. It is kept where forced tokens of the row
        were less often right.
        """
        if (new := self._generations[rows] != self._table.generation[rows]).any():
            self._begin(rows[new])
        self._advance(rows)
        self._has_forced = True
        for pauses in self._pauses_of.values():
            pauses.looks_left = 0
        starts, right = np.cumsum(counts) - counts, self._forced_share[rows]
        if (worse := right < np.minimum(self._share[rows], INITIAL_SHARE)).any():
            self._trust_forced(rows[worse])
            rows, starts, counts = rows[~worse], starts[~worse], counts[~worse]
        counts = np.minimum(counts, MAX_ROW_DRAFTS)
        due = (self._size[rows] <= self._at[rows]) & (self._next_search[rows] <= self._table.applied_tokens[rows])
        if (due := due & self._may_draft[rows]).any():
            self._search(rows[due])
        given, which = np.zeros((rows.size, MAX_ROW_DRAFTS), np.int32), _AHEAD[:-1] < counts[:, None]
        given[which] = tokens[ramp(starts, counts)]
        at = self._at[rows]
        found = self._follows_from[rows, at, :-1]
        known = (self._size[rows] - at >= counts) & ((found == given) | ~which).all(axis=1)
        self._forced_counts[rows] = np.where(known, at, 0) + counts
        if not known.all():
            rows, given, which = rows[~known], given[~known], which[~known]
            self._follows[rows, :MAX_ROW_DRAFTS] = given
            self._shares[rows, 1 : 1 + FOLLOWS] = -np.inf
            self._shares[rows, 1 : 1 + MAX_ROW_DRAFTS] = np.where(which, 0.0, -np.inf)
            self._size[rows], self._at[rows], self._upto[rows] = counts[~known], 0, self._table.applied_tokens[rows]

    def sat_out(self, rows: Rows) -> None:
        """Draft nothing for rows that were late until a token of theirs has come, and fewer then."""
        if (new := self._generations[rows] != self._table.generation[rows]).any():
            self._begin(rows[new])
        self._judge(rows, np.zeros(rows.size, np.int32), np.ones(rows.size, np.int32))
        self._size[rows] = self._at[rows] = self._forced_counts[rows] = 0
        self._next_search[rows] = self._table.applied_tokens[rows] + 1

    def _is_left_out(self, rows: Rows, pauses: Pauses) -> bool:
        """Return whether this look for drafts of `rows` is left out.

        Rows that begin end the pause, unless drafts of their tenants were mostly wrong.
        """
        if not rows.size or not self._model.observations:
            return True
        if not pauses.looks_left:
            return False
        self._looks += 1
        pauses.looks_left -= 1
        every = self._table.rows(rows)
        if np.count_nonzero(new := self._generations[every] != self._table.generation[every]):
            self._begin(rows[new])
            if (self._may_draft[rows[new]] & (self._share[rows[new]] >= TRUSTED_SHARE)).any():
                pauses.looks_left = 0
                return False
        return True

    def _trust_forced(self, rows: Rows) -> None:
        """Trust forced drafts of rows a little more, as they are not compared while the row does without them."""
        self._forced_share[rows] += RECOVERY_RATE * (FORCED_SHARE - self._forced_share[rows])

    def _watch(self, rows: Rows, timid: npt.NDArray[np.bool_], every: Rows | slice) -> None:
        """Compare rows that are trusted too little for a draft, [k] mask, with what they would have guessed, and guess.

        A row is due at once, soon again for short outputs, and then at looks that many rows share.
        """
        if self._has_forced:
            forced = rows[timid & (self._forced_counts[every] > self._at[every])]
            self._size[forced] = self._at[forced] = self._forced_counts[forced] = 0
            self._trust_forced(forced)
        rows = rows[timid & (self._watch_at[every] <= self._looks)]
        if not rows.size:
            return
        pause = WATCH[np.minimum(self._watches[rows], WATCH.size - 1)]
        self._watch_at[rows] = (self._looks // pause + 1) * pause
        self._watches[rows] += 1
        self._advance(rows)
        rows = rows[
            (self._size[rows] <= self._at[rows]) & (self._next_search[rows] <= self._table.applied_tokens[rows])
        ]
        if rows.size:
            self._search(rows)

    def _judge_both(self, rows: Rows, right: Int32 | Rows, tried: Int32 | Rows, at: Int32) -> None:
        """Learn as _judge, for forced guesses apart. at: of what was to follow, the first guess."""
        if not self._has_forced or not (some := self._forced_counts[rows] > at).any():
            self._judge(rows, right, tried)
            return
        forced = np.maximum(self._forced_counts[rows] - at, 0)
        share, first = self._forced_share[rows], np.minimum(tried, forced)
        share += SHARE_RATE * (np.minimum(right, forced) / np.maximum(first, 1) - share)
        self._forced_share[rows[some]] = np.minimum(np.maximum(share[some], MIN_SHARE), MAX_SHARE)
        rest = tried > first
        self._judge(rows[rest], (right - first)[rest], (tried - first)[rest])

    def _judge(self, rows: Rows, right: Int32 | Rows, tried: Int32 | Rows) -> None:
        """Learn that right[i] of tried[i] guesses, at least one, for rows[i] were right."""
        share = self._share[rows]
        share += SHARE_RATE * (right / tried - share)
        self._share[rows] = np.minimum(np.maximum(share, MIN_SHARE), MAX_SHARE)

    def _affordable(self, rows: Rows, context: int) -> int:
        """Return the tokens of prompts and drafts beside `rows` with which no declared limit of the time between tokens
        is passed; UNBOUNDED without one.
        """
        table = self._table
        if not table.tbt_rows:
            return UNBOUNDED
        limits = table.tbt_slo_ns[rows]
        limits = limits[limits > 0]
        if not limits.size:
            return UNBOUNDED
        limit = self._model.target_ns(max(float(limits.min()) - self._alone_ns, 0.0))
        return self._model.largest(limit, rows.size, context, context // rows.size)

    def _begin(self, rows: Rows) -> None:
        """Take other sequences as those of these rows."""
        table = self._table
        self._misses[rows] = self._next_search[rows] = self._watches[rows] = self._watch_at[rows] = 0
        self._at[rows] = self._size[rows] = self._forced_counts[rows] = self._checked_tokens[rows] = 0
        self._forced_share[rows], self._pace[rows] = FORCED_SHARE, 1.0
        self._generations[rows] = table.generation[rows]
        self._index.clear(rows)
        for row in rows.tolist():
            request: NewRequest = table.request[row]
            willing = request.speculate and (not request.grammar or self._limits.masks_behind_drafts)
            self._may_draft[row], self._has_prediction[row] = willing, request.prediction.size > 0
            self._share[row] = INITIAL_SHARE if self._has_prediction[row] else self._history.share(request.tenant)
            if willing and request.prediction.size:
                if self._predictions is None:
                    self._predictions = Predictions(table)
                self._predictions.set(row, request.prediction)

    def _ready(self, rows: Rows, share: npt.NDArray[np.float64], least: float) -> npt.NDArray[np.bool_]:
        """Return which of rows, [k], have tokens that probably come next; search for those for which it is due.

        share: [k] of the drafts of each row that were right. least: the chance from which a draft is worth it.
        """
        self._advance(rows)
        size = self._size[rows]
        ready = size - self._at[rows]
        short = ready == 0
        # Where what was kept of a text ends, there may be more of it.
        ending = ((size == FOLLOWS) & (ready < MAX_ROW_DRAFTS)).nonzero()[0]
        short[ending] |= share[ending] ** ready[ending] > least
        short &= self._next_search[rows] <= self._table.applied_tokens[rows]
        if np.count_nonzero(short):
            self._search(rows[short])
            return self._size[rows] > self._at[rows]
        found: npt.NDArray[np.bool_] = ready > 0
        return found

    def _first_share(self, rows: Rows) -> npt.NDArray[np.float64]:
        """Return [k] the share that was right of drafts like the next one of each row."""
        if not self._has_forced:
            return self._share[rows]
        return np.where(self._forced_counts[rows] > self._at[rows], self._forced_share[rows], self._share[rows])

    def _chances(self, rows: Rows) -> Float32:
        """Return [k, MAX_ROW_DRAFTS] logarithms of the chance that the first 1, 2, ... tokens found are right."""
        at = self._at[rows]
        shares = self._shares_from[rows, at]
        chances = shares[:, 1:] - shares[:, :1]  # of the places that agree as far as the row has come
        share = np.log(self._share[rows])[:, None]
        chances += share * _DRAFTS
        if self._has_forced:
            forced = np.maximum(self._forced_counts[rows] - at, 0)[:, None]
            chances += (np.log(self._forced_share[rows])[:, None] - share) * np.minimum(_AHEAD[1:], forced)
        return chances

    def _advance(self, rows: Rows) -> None:
        """Compare the tokens that came since with what was to follow: it goes on behind them, or it was wrong."""
        table = self._table
        since = table.applied_tokens[rows] - self._upto[rows]
        moved = ((since > 0) & (self._size[rows] > 0)).nonzero()[0]
        if not moved.size:
            return
        if moved.size < rows.size:
            rows, since = rows[moved], since[moved]
        upto, at = self._upto[rows], self._at[rows]
        wrong = since > np.minimum(self._size[rows] - at, MAX_ROW_DRAFTS + 1)
        checked = self._checked_tokens[rows]
        right = np.maximum(checked - 1 - upto, 0)  # drafts of the last step: they need no look
        rest = since - right
        span = _AHEAD[: min(int(rest.max()), MAX_ROW_DRAFTS + 1)]
        # Of rows that moved less, and at the end of a context, tokens behind the last are read and left out.
        came = table.tokens_flat[(table.base[rows] + upto + right)[:, None] + span]
        same = (came == self._follows_from[rows, at + right, : span.size]) | (span >= rest[:, None])
        wrong |= ~same.all(axis=1)
        if (unchecked := checked <= upto).any():  # what would have been right counts as what was
            right = np.logical_and.accumulate(same[unchecked], axis=1).sum(axis=1)
            right = np.minimum(right, since[unchecked])
            self._judge_both(rows[unchecked], right, right + (right < since[unchecked]), at[unchecked])
        self._at[rows] = at + since
        self._upto[rows] = upto + since
        self._size[rows[wrong]] = self._at[rows[wrong]] = self._forced_counts[rows[wrong]] = 0

    def _search(self, rows: Rows) -> None:
        """Look for what followed the last applied tokens of rows where they stood before."""
        table = self._table
        applied = table.applied_tokens[rows].astype(np.int64)
        self._index.extend(rows, applied - 1)
        tails = self._index.tails(rows, applied)
        own = self._index.find(rows, tails)
        lengths = np.zeros(rows.size, np.intp)
        lengths[own.rows] = own.longest
        others: list[tuple[Predictions | History, Places]] = []
        if self._predictions is not None and (which := self._has_prediction[rows].nonzero()[0]).size:
            found = self._predictions.find(rows[which], tails[which])
            found.rows = which[found.rows]
            # What the client says goes before what the sequence says.
            others.append((self._predictions, found.select(found.longest >= lengths[found.rows])))
            lengths[found.rows] = np.maximum(lengths[found.rows], found.longest)
        if self._history.texts:
            which, texts = self._of_tenants(rows, (lengths < MAX_MATCH).nonzero()[0])
            found = self._history.find(texts, tails[which])
            found.rows = which[found.rows]
            others.append((self._history, found.select(found.longest > lengths[found.rows])))
        if others:
            own = own.select(~np.isin(own.rows, np.concatenate([found.rows for _, found in others])))
        sizes = np.zeros(rows.size, np.int32)
        if own.rows.size:
            self._take(rows, own, sizes, *self._index.follow(own, applied[own.rows], repeats=True))
        for source, found in others:  # the history last, as its matches are the longest
            if found.rows.size:
                self._take(rows, found, sizes, *source.follow(found))
        self._size[rows], self._at[rows], self._upto[rows], self._forced_counts[rows] = sizes, 0, applied, 0
        self._misses[rows] = misses = (np.minimum(self._misses[rows], 7) + 1) * (sizes == 0)
        missed = misses.nonzero()[0]
        self._next_search[rows[missed]] = applied[missed] + np.minimum(1 << (misses[missed] - 1), MAX_PAUSE)

    def _take(self, rows: Rows, found: Places, size: Int32, follows: Int32, shares: Float32, count: Rows) -> None:
        """Note what was found for some of `rows`, and how much in `size`."""
        at = rows[found.rows]
        self._follows[at, :FOLLOWS], self._shares[at, 1 : 1 + FOLLOWS] = follows, shares
        size[found.rows] = count

    def _of_tenants(self, rows: Rows, which: Rows) -> tuple[Rows, Rows]:
        """Return those of `which`, places in `rows`, with outputs of their tenants, and the texts of these."""
        tenants = self._table.tenant[rows[which]]
        if not which.size or (tenants == tenants[0]).all():
            text = self._history.text(self._table.request[rows[which[0]]].tenant) if which.size else -1
            return (which, np.full(which.size, text)) if text >= 0 else (NO_ROWS, NO_ROWS)
        _, one, each = np.unique(tenants, return_index=True, return_inverse=True)
        of_tenant = [self._history.text(self._table.request[row].tenant) for row in rows[which[one]].tolist()]
        texts = np.array(of_tenant, np.intp)[each]
        known = texts >= 0
        return which[known], texts[known]

    def _within(self, rows: Rows, counts: Int32, blocks_left: int) -> Int32:
        """Return as many of the drafts of each row as its blocks and `blocks_left` more allow."""
        table, size = self._table, self._limits.block_size
        room = table.capacity[rows] - table.planned_tokens[rows]
        beyond = (counts > room).nonzero()[0]
        more = -(-(counts[beyond] - room[beyond]) // size)
        if int(more.sum()) > blocks_left:
            left = np.minimum(np.maximum(blocks_left - (more.cumsum() - more), 0), more)
            counts[beyond] = np.minimum(counts[beyond], room[beyond] + left * size)
        return counts


def min_chance(rows: int, step_ns: float, draft_ns: float) -> float:
    """Return the chance of being right from which a draft brings more tokens a second than it costs."""
    return max(draft_ns * rows / max(step_ns, 1.0), 0.02)


def level(counts: Int32, room: int) -> Int32:
    """Return `counts` with the largest ones cut, so that their sum is at most `room`."""
    if int(counts.sum()) <= room:
        return counts
    ordered = np.sort(counts)
    # With all of the first i whole and the others cut to the next one, the sum is sums[i].
    sums = np.cumsum(ordered) + ordered * np.arange(counts.size - 1, -1, -1)
    whole = int(np.searchsorted(sums, room, side="right"))
    before = int(ordered[:whole].sum())
    each, over = divmod(room - before, counts.size - whole)
    cut = np.minimum(counts, each)
    cut[(counts > each).nonzero()[0][:over]] += 1
    return cut
