"""Models of a replica's step time, fitted from the timings of its results.

Each replica has one of each model; `observe` is called once an iteration. Used for the token budget, the predicted time
to first token, the choice between swap and recompute, and the simulator. A prediction never falls with more tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

_FIRST = 16  # the first observations, fitted together and from the start each time: too few to tell a bad one
FIRST_TOKENS = 512  # of a step of a replica that has timed few
_SLOWER = 10.0  # times; a larger change is more often a fit without a cost for such steps, and has to come twice
_LOST = 1e-3  # of the predicted times; where steps take less, the fit has gone astray and begins anew
FOLD = 32  # observations that one fold takes in
UNBOUNDED = 2**31 - 1  # tokens; returned by `largest` where time does not grow with tokens

KNEES = (64, 128, 256, 512)  # tokens; from each on a token may cost more than before
_KNEES = np.array(KNEES, np.float64)
# Features near 1 in an ordinary step: sums stay well-conditioned.
_SCALE = np.array([1.0, 512.0, 65_536.0, 131_072.0, *[512.0] * len(KNEES)])
# Information in the first guess, in observations: a line unless the steps say otherwise. A large chunk that takes
# longer than the line says is held to be past a knee: held to be attention, it would keep long prompts waiting.
_PRIOR = np.array([1e-3] * 3 + [0.1] + [0.01] * len(KNEES))
_EXPERTS_PRIOR = 1e-3
_FORGET = 0.15  # share of the information in an excited direction that a fold forgets: a memory of about 400 steps
_LOSE = 2.0  # no direction loses more than this times the information that the fold adds to it
_SLIVER = 1e-9  # keeps the information matrix regular
_CLIP = 3.0  # standard deviations beyond which residuals are cut
_CALM = 0.005  # least relative noise that is assumed
_RING = 32  # latest residuals from which noise and shift are estimated
_KNOWN = 8  # residuals of a kind below which nothing is cut
SPARE = 0.05  # share of a limit of a step's time that is left free
_ERRORS = 128  # latest steps with prompts; the largest error but one of the model in use is the 0.99 quantile


class StepTime:
    """t = c0 + f(tokens) + c2 * decode_context + c3 * prefill_context, in ns, by recursive least squares.

    f is convex and piecewise linear: c1 * tokens, and from each of KNEES on the slope may grow. It fits a roofline, the
    larger of the time to read the weights (flat) and of the time to compute (linear): max(a, b * tokens).

    tokens: of all sequences. decode_context: sum of the context lengths of the decodes. prefill_context: sum over
    prefill chunks of length * (start + (length + 1) / 2).

    A replica with a mixture of experts has the term c4 * touched(tokens): the experts of a layer that some token is
    given to, which are read from memory. With even routing of k experts a token it is
    touched(n) = experts * (1 - (1 - k / experts)^n), which grows fast with the first rows; a long prompt touches all.

    Errors are relative to the step's time. Differences from a plain recursive fit:

    - A residual is cut at 3 standard deviations of its prediction, which grow with the noise and with the uncertainty
      in that direction. The noise is the median absolute residual of the last 32 steps of its kind (with or without
      prefill). So a single bad timing hardly counts, and a lasting change soon counts in full.
    - A direction forgets only in proportion to the information that the fold adds to it. So hours of pure decode do not
      erase the cost of prefills, and the information matrix never becomes singular.
    - When most of the last 32 residuals agree on one ratio, the whole machine has become slower or faster: all
      coefficients are multiplied by that ratio, and old information counts a tenth. Above 10 the next 32 residuals have
      to agree on it, too: the fit may have had hardly a cost for such steps.
    - The coefficients in use are the closest ones (in the metric of the information) that are not negative.

    Predictions lag by up to 31 observations, but a step larger than all before is taken in at once; `fold` takes in the
    pending ones.
    """

    __slots__ = (
        "_by_kind",
        "_covariance",
        "_experts",
        "_information",
        "_is_slower",
        "_pending_samples",
        "_prompts",
        "_recent",
        "_scale",
        "_sliver",
        "_theta",
        "_untouched_share",
        "_weights",
        "c0",
        "c1",
        "c2",
        "c3",
        "c4",
        "error",
        "knees",
        "largest_seen",
        "observations",
        "prompts_observed",
    )

    def __init__(self, experts: int = 0, per_token: int = 0) -> None:
        """experts: of a layer, per_token of which each token is given to; 0: there are none."""
        self._experts = experts
        self._untouched_share = 1.0 - per_token / experts if experts else 1.0  # share of the experts after one token
        self._scale = np.append(_SCALE, experts) if experts else _SCALE
        self._sliver = _SLIVER * np.eye(len(self._scale))
        features = len(self._scale)
        self.observations = 0
        self.prompts_observed = 0  # of these, steps with prompts
        self.largest_seen = 0  # tokens of the largest step
        self.error = 0.0  # 0.99 quantile of measured / predicted - 1 over the last 128 steps with prompts, 0 to 1
        self.c0 = self.c1 = self.c2 = self.c3 = self.c4 = 0.0
        self._pending_samples: list[tuple[int, int, float, int]] = []
        self.knees: list[tuple[int, float]] = []  # (tokens, ns that each token above costs more), where not 0
        self._theta: Float64 = np.zeros(features)  # as fitted, for scaled features; may be negative
        self._weights: Float64 = np.zeros(features)  # in use, for scaled features; none negative
        self._information: Float64 = np.zeros((features, features))
        self._covariance: Float64 = np.zeros((features, features))  # its inverse
        self._prompts: deque[tuple[Float64, float]] = deque(maxlen=_ERRORS)  # scaled features, ns: steps with prompts
        self._recent: deque[float] = deque(maxlen=_RING)  # relative residuals
        self._is_slower = False  # the last _RING of them agreed on a ratio above _SLOWER
        self._by_kind: tuple[deque[float], deque[float]] = (deque(maxlen=_RING), deque(maxlen=_RING))  # absolute ones

    def observe(self, tokens: int, decode_context: int, prefill_context: float, step_ns: int) -> None:
        """Add one measured step. A `step_ns` of 0 or less means not measured and is ignored."""
        if step_ns <= 0:
            return
        self._pending_samples.append((tokens, decode_context, prefill_context, step_ns))
        self.observations += 1
        self.prompts_observed += prefill_context > 0
        larger = tokens > self.largest_seen  # what such a step takes was only guessed until now
        self.largest_seen = max(self.largest_seen, tokens)
        if larger or len(self._pending_samples) >= FOLD or self.observations in (1, 2, 4, 8, _FIRST):
            self.fold()

    def predict(self, tokens: int, decode_context: int = 0, prefill_context: float = 0) -> float:
        """Return the predicted time of a step, in ns; 0.0 before the first observation."""
        time = self.c0 + self.c1 * tokens + self.c2 * decode_context + self.c3 * prefill_context
        for knee, more in self.knees:
            if tokens > knee:
                time += more * (tokens - knee)
        if self._experts:
            time += self.c4 * self.touched_experts(tokens)
        return time

    @property
    def trusted_tokens(self) -> int:
        """Return the tokens of a step up to which a prediction is good enough to keep a limit by.

        FIRST_TOKENS until 16 steps with prompts were timed, then a quarter more than the largest step that was timed.
        """
        grown = self.largest_seen * 5 // 4 if self.prompts_observed >= _FIRST else 0
        return max(grown, FIRST_TOKENS)

    def touched_experts(self, tokens: float) -> float:
        """Return how many experts of a layer so many tokens are given to, with even routing."""
        return self._experts * (1.0 - math.pow(self._untouched_share, tokens))

    def target_ns(self, limit_ns: float) -> float:
        """Return the predicted time (ns) of a step that takes at most `limit_ns` in 99 of 100 cases."""
        return limit_ns * (1.0 - SPARE) / (1.0 + self.error)

    def largest(self, limit_ns: float, decodes: int, decode_context: int, prefix: int = 0) -> int:
        """Return the most prompt tokens beside `decodes` in a step that is predicted to take at most `limit_ns`.

        They are one prefill chunk of n tokens after `prefix` tokens. Its time, f(decodes + n) - f(decodes) +
        c3 * n * (prefix + (n + 1) / 2), is solved for n. The result is 0 where the decodes alone take longer, and
        UNBOUNDED where no number of tokens reaches the limit.
        """
        room = limit_ns - self.predict(decodes, decode_context)
        most = self._tokens_within(room, decodes, prefix)
        if not self.c4:
            return most
        # The prompt's first tokens touch more experts, of which the rest has little more to read.
        least = self._tokens_within(room - self._left_to_touch(decodes), decodes, prefix)
        while least < most and self._left_to_touch(decodes + least) > 0.01 * self.c4 * self._experts:
            middle = (least + most + 1) // 2
            if self.predict(decodes + middle, decode_context, middle * (prefix + (middle + 1) / 2)) <= limit_ns:
                least = middle
            else:
                most = middle - 1
        return least

    def _left_to_touch(self, tokens: int) -> float:
        """Return the time (ns) of the experts that so many tokens leave out."""
        return self.c4 * (self._experts - self.touched_experts(tokens))

    def _tokens_within(self, room: float, decodes: int, prefix: int) -> int:
        """Return the most prompt tokens beside `decodes` that take at most `room` ns more, experts left out."""
        if room < 0:
            return 0
        half, slope, taken = self.c3 / 2, self.c1 + self.c3 * (prefix + 0.5), 0
        for knee, more in [*self.knees, (UNBOUNDED, 0.0)]:
            length = knee - decodes - taken  # of the part up to this knee
            if length > 0:
                if (left := room - length * (slope + half * length)) < 0 or knee == UNBOUNDED:
                    return taken + _root(half, slope, room)
                room, taken, slope = left, taken + length, slope + self.c3 * length
            slope += more
        raise AssertionError

    def balanced_tokens(self, share: float, decodes: int, decode_context: int, prefix: int = 0) -> int:
        """Return the prompt tokens n beside `decodes` at which n * t'(n) / t(n) is `share`; UNBOUNDED for 1 and more.

        t is the time of the step. The pairs of query and key within the chunk are left out, so t is linear between
        knees. See ModelBudget for the meaning.
        """
        if share >= 1.0:
            return UNBOUNDED
        time, slope, taken = self.predict(decodes, decode_context), self.c1 + self.c3 * prefix, 0
        if self.c4:  # a prompt touches all experts
            time += self._left_to_touch(decodes)
        for knee, more in [*self.knees, (UNBOUNDED, 0.0)]:
            length = knee - decodes - taken
            if length > 0:
                if slope > 0:
                    best = share * (time - slope * taken) / (slope * (1.0 - share))  # n * slope = share * t(n)
                    if best < taken + length:
                        return max(int(best), taken)
                time, taken = time + slope * length, taken + length
            slope += more
        return UNBOUNDED

    def fold(self) -> None:
        """Fit the pending observations, with array operations on all of them: tens of microseconds."""
        if not self._pending_samples:
            return
        rows = np.array(self._pending_samples, dtype=np.float64)
        measured = rows[:, 3]
        features = np.ones((len(rows), len(self._scale)))
        features[:, 1:4] = rows[:, :3]
        features[:, 4 : 4 + len(KNEES)] = np.maximum(rows[:, :1] - _KNEES, 0.0)
        if self._experts:
            features[:, -1] = self._experts * (1.0 - self._untouched_share ** rows[:, 0])
        features /= self._scale
        all_pending = len(rows) == self.observations
        if all_pending:  # first guess: all steps take the same time
            self._start(_median(measured.tolist()))
        if not all_pending or self.observations >= _FIRST:
            self._pending_samples.clear()
        self._prompts.extend(
            (row, ns) for row, ns in zip(features.copy(), measured.tolist(), strict=True) if row[3] > 0
        )
        predicted = np.maximum(features @ self._weights, 1.0)
        measured = self._cut(features, predicted, measured)
        # A step that took far longer than predicted is divided by its own time, so that an error weighs no more than a
        # whole step. Errors of one factor up and of the same factor down then weigh about the same.
        unit = np.where(measured > 1.5 * predicted, measured, predicted)
        features /= unit[:, None]
        brought = features.T @ features
        known = self._information
        share = np.linalg.solve(known + (_LOSE / _FORGET) * brought, (_LOSE / _FORGET) * brought)
        known = known - _FORGET * (known @ share)
        self._know((known + known.T) / 2 + brought)
        self._theta = self._theta + self._covariance @ (features.T @ (measured / unit - features @ self._theta))
        self._follow_shift(rows[:, 3])
        self._publish()

    def _start(self, step_ns: float) -> None:
        self._theta = np.zeros(len(self._scale))
        self._theta[0] = step_ns
        self._weights = self._theta
        prior = np.append(_PRIOR, _EXPERTS_PRIOR) if self._experts else _PRIOR
        self._know(np.diag(prior / step_ns**2))
        self._drop_residuals()

    def _cut(self, features: Float64, predicted: Float64, measured: Float64) -> Float64:
        """Return the measured times [n] with their residuals cut; record the residuals."""
        residuals = measured / predicted - 1.0
        scaled = features / predicted[:, None]
        leverage = ((scaled @ self._covariance) * scaled).sum(axis=1)
        kinds = (features[:, 3] > 0).tolist()
        for kind, residual in zip(kinds, residuals.tolist(), strict=True):  # plain floats: faster than an array of 32
            self._recent.append(residual)
            self._by_kind[kind].append(abs(residual))
        noise = [max(1.4826 * _median(ring), _CALM) if len(ring) >= _KNOWN else np.inf for ring in self._by_kind]
        bound = _CLIP * np.where(kinds, noise[1], noise[0]) * np.sqrt(1.0 + np.maximum(leverage, 0.0))
        return np.asarray(predicted * (1.0 + np.minimum(np.maximum(residuals, -bound), bound)), dtype=np.float64)

    def _follow_shift(self, measured: Float64) -> None:
        if len(self._recent) < _RING:
            return
        was_slower, self._is_slower = self._is_slower, False
        middle = _median(self._recent)
        if abs(middle) < 0.05 or abs(middle) < 4 * _median([abs(one - middle) for one in self._recent]):
            return
        ratio = 1.0 + middle
        if ratio > _SLOWER and not was_slower:  # as of decodes behind prompts alone: they have a cost from now on
            self._is_slower = True
            self._recent.clear()
            return
        if ratio < _LOST:
            self._start(_median(measured.tolist()))
            return
        self._theta = self._weights * ratio  # the residuals are relative to these
        self._know(self._information * (0.1 / ratio**2))
        self._drop_residuals()

    def _drop_residuals(self) -> None:
        for ring in (self._recent, self._prompts, *self._by_kind):
            ring.clear()

    def _know(self, information: Float64) -> None:
        # The sliver on the diagonal outweighs rounding errors in a direction without information for a million folds.
        self._information = information + self._sliver * information[0, 0]
        self._covariance = np.asarray(np.linalg.inv(self._information), dtype=np.float64)

    def _publish(self) -> None:
        self._weights = _not_negative(self._theta, self._information)
        self.c0, self.c1, self.c2, self.c3, *more = (self._weights / self._scale).tolist()
        if self._experts:
            self.c4 = more.pop()
        self.error = self._quantile()
        self.knees = [pair for pair in zip(KNEES, more, strict=True) if pair[1] > 0]

    def _quantile(self) -> float:
        """Return the error of the coefficients in use over the kept steps, 0 to 1: more is a pause of the machine."""
        if len(self._prompts) < 2:
            return 0.0
        features = np.array([row for row, _ in self._prompts])
        measured = np.array([ns for _, ns in self._prompts])
        errors = measured / np.maximum(features @ self._weights, 1.0) - 1.0
        return min(max(float(np.partition(errors, -2)[-2]), 0.0), 1.0)


class TokenTime:
    """Iteration time per token as an exponential mean (alpha 0.1), for the dynamic budget of Sarathi's facts sheet."""

    __slots__ = ("token_ns",)

    def __init__(self) -> None:
        self.token_ns = 0.0  # 0.0 means nothing measured

    def observe(self, tokens: int, step_ns: int) -> None:
        """Add one measured step of `tokens`. A step without tokens or without a time is ignored."""
        if tokens > 0 and step_ns > 0:
            now = step_ns / tokens
            self.token_ns = self.token_ns + 0.1 * (now - self.token_ns) if self.token_ns else now

    def budget(self, limit_ns: float, cap: int, decodes: int, multiple: int = 64) -> int:
        """Return the prefill tokens of a step within `limit_ns`: min(limit / mean, cap) - decodes, at least 0.

        Rounded down to a multiple of `multiple`. Before any measurement it is 256, as far as `cap` allows.
        """
        if not self.token_ns:
            return max(min(256, (cap - decodes) // multiple * multiple), 0)
        return max((int(min(limit_ns / self.token_ns, cap)) - decodes) // multiple * multiple, 0)


class SwapTime:
    """Time to copy a block to or from the host, in ns: an exponential mean (alpha 0.1).

    It starts at block_bytes / link_bytes_s.
    """

    __slots__ = ("block_ns",)

    def __init__(self, block_bytes: int, link_bytes_s: float) -> None:
        self.block_ns = block_bytes / link_bytes_s * 1e9

    def observe(self, blocks: int, ns: int) -> None:
        """Add one measured copy of `blocks` blocks. A time is cut to a quarter and to 4 times the mean."""
        if blocks > 0 and ns > 0:
            now = min(max(ns / blocks, self.block_ns / 4), self.block_ns * 4)
            self.block_ns += 0.1 * (now - self.block_ns)

    def predict(self, blocks: int) -> float:
        """Return the predicted time to copy `blocks` in one direction, in ns."""
        return blocks * self.block_ns


def _root(half: float, slope: float, room: float) -> int:
    """Return the largest whole n with n * (slope + half * n) <= room; UNBOUNDED where there is none."""
    bottom = slope + (slope * slope + 4 * half * room) ** 0.5
    if bottom <= 0 or (count := 2 * room / bottom) >= UNBOUNDED:
        return UNBOUNDED
    n = int(count)
    # The root is rounded, so its neighbour may be the exact answer.
    if n and n * (slope + half * n) > room:
        n -= 1
    elif (n + 1) * (slope + half * (n + 1)) <= room:
        n += 1
    return n


def _median(values: Sequence[float] | deque[float]) -> float:
    return sorted(values)[len(values) // 2]


def _not_negative(theta: Float64, information: Float64) -> Float64:
    """Return a vector >= 0 near `theta`: while entries are negative, fix them at 0 and fit the rest again."""
    result = theta
    free = result > 0
    while (result < 0).any():
        result = np.zeros(len(theta))
        if not free.any():
            break
        rows = information[free]
        result[free] = np.linalg.solve(rows[:, free], rows @ theta)
        free &= result > 0
    return np.asarray(result, dtype=np.float64)
