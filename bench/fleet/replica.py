"""Model one replica as a fluid: all decoding requests advance together; the running requests give a step its time.

Between two events (a prompt is computed, a sequence ends) a step of n decodes and P prompt tokens takes
a = fixed + max(weights, (n + P) * token) + context * kv + P * pairs, and the context grows by n a step, so k steps take
a*k + b*k^2/2. So a request costs three events and no step is simulated. `bench/fleet/run.py` drives many of these;
`bench/fleet/calibration.py` compares them with the scheduler's own core.

What is left out: preemption (memory is reserved for what a request will really need, which no scheduler knows), the
order of classes, step times that differ from the formula.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass
from math import sqrt

from services.simulator.device.roofline import Roofline

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class StepCost:
    """ns of a step: fixed + max(weights, tokens * token) + decode context * context + pairs of attention * pair."""

    fixed: float
    weights: float
    token: float
    context: float
    pair: float

    @classmethod
    def of(cls, roofline: Roofline) -> StepCost:
        """Return the formula of a roofline."""
        empty = roofline.step_ns(0, 0, 0)
        many = 1_000_000
        token = (roofline.step_ns(2 * many, 0, 0) - roofline.step_ns(many, 0, 0)) / many
        fixed = roofline.step_ns(many, 0, 0) - many * token
        context = (roofline.step_ns(0, many, 0) - empty) / many
        pair = (roofline.step_ns(0, 0, many) - empty) / many
        return cls(fixed, empty - fixed, token, context, pair)

    def faster(self, speed: float) -> StepCost:
        """Return the formula of a machine that is `speed` times as fast."""
        return StepCost(*(getattr(self, name) / speed for name in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Size:
    """Of each replica: sequences at most, tokens of KV, tokens of a step, steps planned ahead, tokens of a block."""

    slots: int
    kv_tokens: int
    step_tokens: int = 512
    lookahead: int = 1
    block_size: int = 16


class Requests:
    """The data of requests that the replicas share, one entry each. prompt and output change when a request starts
    anew."""

    def __init__(self, prompt: list[int], output: list[int], group: list[int], prefix_tokens: int) -> None:
        n = len(prompt)
        self.prompt, self.output, self.group = prompt, output, group
        self.prefix_tokens = prefix_tokens
        self.lag = [0.0] * n  # ns until the steps that are planned already have run
        self.first = [NEVER] * n  # ns of the first token
        self.end = [NEVER] * n
        self.cached = [0] * n  # prompt tokens that lay in the cache


class Replica:
    """Times in ns from the start of the run; `now` never falls."""

    __slots__ = (
        "_a", "_b", "_budget", "_chunk", "_context", "_cost", "_decoding", "_finish", "_hit", "_now", "_remaining",
        "_requests", "_reserved", "_size", "_steps", "busy_ns", "cached_groups", "computed", "head", "load", "number",
        "pending", "queue", "speed", "up", "version",
    )  # fmt: skip

    def __init__(self, number: int, requests: Requests, size: Size, cost: StepCost, speed: float = 1.0) -> None:
        self.number, self.speed = number, speed
        self._requests, self._size, self._cost = requests, size, cost.faster(speed)
        self._budget = size.step_tokens
        self.up = True
        self.busy_ns = 0.0
        self.computed = 0  # tokens, prompts and outputs
        self.version = 0
        self.queue: deque[int] = deque()
        self.cached_groups: OrderedDict[int, None] = OrderedDict()
        self._clear(0.0)

    def _clear(self, now: float) -> None:
        self._now, self._steps = now, 0.0
        self._finish: list[tuple[float, int]] = []  # (steps at its end, request)
        self._decoding, self._context, self._reserved = 0, 0.0, 0
        self.head = -1  # the request that prefills
        self._remaining, self._chunk, self._hit = 0.0, 0.0, 0
        self.pending = 0  # tokens of prompts, of the head and the queue
        self.load = 0  # tokens of prompt and output outstanding
        self._a = self._b = 0.0
        self.queue.clear()
        self.cached_groups.clear()

    @property
    def running(self) -> int:
        return self._decoding + (self.head >= 0)

    @property
    def kv_share(self) -> float:
        return self._reserved / self._size.kv_tokens

    @property
    def oldest_waiting(self) -> int:
        return self.queue[0] if self.queue else -1

    def fits(self, index: int) -> bool:
        """Return whether the request fits the replica when it is empty."""
        return self._need(index) <= self._size.kv_tokens

    @property
    def open(self) -> bool:
        """Return whether another request would start at once, or within a step, if its KV fits."""
        return not self.queue and self.pending < self._budget and self._decoding + (self.head >= 0) < self._size.slots

    def has_room(self, index: int) -> bool:
        return self.open and self._reserved + self._need(index) <= self._size.kv_tokens

    def take(self, index: int, now: float) -> float:
        """Add a request; return the time of the next event, or -1 if that has not changed."""
        requests = self._requests
        size = requests.prompt[index] + requests.output[index]
        self.load += size
        self.pending += requests.prompt[index]
        busy = self._decoding or self.head >= 0
        if busy:
            self.advance(now)
            # The step that runs, half of it on average, and those planned already come first.
            requests.lag[index] = (0.5 + self._size.lookahead) * self._a
        else:
            self._now = now
            requests.lag[index] = 0.0
        self.queue.append(index)
        if self.head >= 0:
            wider = min(self._budget - self._decoding, self.pending)
            if wider <= self._chunk:
                return -1.0
            self._chunk = float(wider)
        elif not self._start():
            return -1.0
        return self._next()

    def advance(self, now: float) -> None:
        """Run until `now`, which is at or before the next event."""
        elapsed = now - self._now
        if elapsed <= 0 or not (self._decoding or self.head >= 0):
            self._now = max(now, self._now)
            return
        a, b = self._a, self._b
        steps = elapsed / a if b == 0 else (sqrt(a * a + 2 * b * elapsed) - a) / b
        self._run(steps, elapsed)

    def _run(self, steps: float, elapsed: float) -> None:
        self._steps += steps
        self._context += self._decoding * steps
        self._a += self._b * steps
        if self.head >= 0:
            self._remaining -= self._chunk * steps
        self.busy_ns += elapsed
        self._now += elapsed

    def event(self, now: float) -> tuple[list[int], float]:
        """Process the event at `now`; return the ended requests and the time of the next event."""
        self.advance(now)
        requests, ended = self._requests, []
        done = self.head
        if done >= 0 and self._remaining < 0.5:
            self.head = -1
            prompt, output, group = requests.prompt[done], requests.output[done], requests.group[done]
            self.pending -= prompt
            self.computed += prompt - self._hit + output
            at = now + requests.lag[done]
            if requests.first[done] == NEVER:
                requests.first[done] = at
            if group >= 0:
                self._remember(group)
            if output == 1:
                self._leave(done, prompt + output)
                requests.end[done] = at
                ended.append(done)
            else:
                heapq.heappush(self._finish, (self._steps + output - 1, done))
                self._decoding += 1
                self._context += prompt
        finish = self._finish
        while finish and finish[0][0] <= self._steps + 1e-6:
            index = heapq.heappop(finish)[1]
            self._decoding -= 1
            size = requests.prompt[index] + requests.output[index]
            self._context -= size - 1
            self._leave(index, size)
            requests.end[index] = now + requests.lag[index]
            ended.append(index)
        if self.head < 0:
            self._start()
        return ended, self._next()

    def _leave(self, index: int, size: int) -> None:
        self.load -= size
        self._reserved -= self._need(index)

    def _need(self, index: int) -> int:
        """Return the KV of a request at its end, in blocks.

        A shared prefix counts for each request: caches are evicted first.
        """
        block = self._size.block_size
        return -(-(self._requests.prompt[index] + self._requests.output[index]) // block) * block

    def _start(self) -> bool:
        """Start the next prompt if there is one and its KV fits. First come, first served."""
        if not self.queue:
            return False
        requests, index = self._requests, self.queue[0]
        need = self._need(index)
        if self._decoding >= self._size.slots or self._reserved + need > self._size.kv_tokens:
            return False
        self.queue.popleft()
        self._reserved += need
        self.head = index
        prompt, group = requests.prompt[index], requests.group[index]
        self._hit = 0
        if group >= 0 and group in self.cached_groups:
            self.cached_groups.move_to_end(group)
            self._hit = min(requests.prefix_tokens, prompt - 1)
        requests.cached[index] = self._hit
        self._remaining = float(prompt - self._hit)
        # All that waits shares the step, up to the budget; decodes come first.
        self._chunk = max(
            1.0, min(float(self._budget - self._decoding), max(self._remaining, self.pending - self._hit))
        )
        return True

    def _remember(self, group: int) -> None:
        """Add the prefix to the cache, and evict the oldest ones if memory is short."""
        self.cached_groups[group] = None
        self.cached_groups.move_to_end(group)
        room = max(0, self._size.kv_tokens - self._reserved) // max(1, self._requests.prefix_tokens)
        while len(self.cached_groups) > max(1, room):
            self.cached_groups.popitem(last=False)

    def _next(self) -> float:
        """Compute the time of the next event, and the step time until then."""
        self.version += 1
        cost, decoding = self._cost, self._decoding
        steps = NEVER
        if self.head >= 0:
            chunk = self._chunk
            steps = self._remaining / chunk
            tokens = decoding + chunk
            pairs = chunk * (0.5 * (self._remaining + 1) + self._hit) * cost.pair
        else:
            tokens, pairs = decoding, 0.0
        if decoding:
            steps = min(steps, max(0.0, self._finish[0][0] - self._steps))
        elif self.head < 0:
            return NEVER
        linear = tokens * cost.token
        a = cost.fixed + (linear if linear > cost.weights else cost.weights) + self._context * cost.context + pairs
        self._a, self._b = a, decoding * cost.context
        return self._now + a * steps + self._b * steps * steps / 2

    def stop(self, now: float) -> list[int]:
        """Stop the replica; return its requests, which start again elsewhere with their outputs in the prompt."""
        self.advance(now)
        requests = self._requests
        for at, index in self._finish:
            produced = requests.output[index] - max(1, round(at - self._steps))
            requests.prompt[index] += produced
            requests.output[index] -= produced
        left = [index for _, index in self._finish] + ([self.head] if self.head >= 0 else []) + list(self.queue)
        self.computed -= sum(requests.output[index] for _, index in self._finish)
        self._clear(now)
        self.version += 1
        self.up = False
        return left
