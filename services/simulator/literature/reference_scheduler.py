"""The reference scheduler of one article, transcribed rule by rule.

The oracle of table T6 and of the preset `iteration-level`: plain Python over lists that shares no code with the core.
The rules of the article: a heap by (class, arrival). Admission reserves prompt + max_new and stops at the first request
that does not fit. Decodes come first, least TBT slack first. Then prefilling requests get chunks of at most 256 tokens,
a multiple of 64, by (class, TTFT slack). If a request of class <= high has under 15 ms of TBT slack, requests are
preempted until all have over 30.

Rules that the article leaves open:

1. A request gets one chunk a step. With 64 tokens or more left the chunk is a multiple of 64 (so 178 is 128 and then
   50). A rest under 64 is one last chunk and needs that much of the budget.
2. The chunks of a step end with the first request that gets none; a later one never overtakes it.
3. Admission checks blocks and slots only, and may be steps ahead of the first chunk. Reserved blocks are held from
   admission on, but a request counts as running from its first chunk on, and as waiting before.
4. TTFT slack is arrival + limit - now; the default limit is 2 s. Equal slacks go by number.
5. The last chunk of a prompt samples the first token, so max_new tokens take max_new - 1 decodes.
6. TBT slack is last token + limit - (now + predicted time of the decodes alone): only with the prediction can a
   preemption restore slack. A request without a limit is never at risk.
7. The victim is the request with the fewest tokens in KV; among equals the newest. Prefilling requests may be victims.
8. A swapped request keeps its KV; otherwise it computes its tokens again as a prompt. Both return to their old place in
   the queue. A step that preempts admits no request, or the victims would return at once.
9. Admission never preempts, and waiting does not raise a request's class.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

HIGH, NORMAL = 1, 2
BLOCK = 16
CHUNK, MULTIPLE = 256, 64
TTFT_MS = 2000.0
AT_RISK_MS, SAFE_MS = 15.0, 30.0


@dataclass(slots=True)
class Request:
    """A request: the six fields that arrive, then its progress."""

    number: int
    prompt: int
    max_new: int
    priority: int = NORMAL
    arrival_ms: float = 0.0
    ttft_ms: float = TTFT_MS
    tbt_ms: float = 0.0  # 0: no limit
    in_kv: int = 0
    produced: int = 0
    last_token_ms: float = 0.0
    swapped: bool = False

    @property
    def rest(self) -> int:
        """Return the number of prompt and output tokens that are not in KV."""
        return self.prompt + self.produced - self.in_kv

    @property
    def decoding(self) -> bool:
        return self.produced > 0 and self.rest == 1

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.max_new) // BLOCK)

    @property
    def place(self) -> tuple[int, float, int]:
        return self.priority, self.arrival_ms, self.number


class Counts(NamedTuple):
    """Counts of one step: tokens of decodes and of prefill chunks, waiting and running requests (rule 3)."""

    decode: int
    prefill: int
    waiting: int
    running: int


def table_six() -> list[Request]:
    """Return 100 requests that arrive at once: prompts 128 + 10 i, 256 new tokens, every fifth (0, 5, ...) high."""
    return [Request(i, 128 + 10 * i, 256, HIGH if i % 5 == 0 else NORMAL) for i in range(100)]


def step_ms(tokens: int) -> float:
    """Return the step time of T6: 25 + 0.05 x tokens ms."""
    return 25 + 0.05 * tokens


def run(
    requests: Sequence[Request],
    *,
    max_batch_requests: int = 128,
    max_batch_tokens: int = 2048,
    blocks: int = 10_000,
    host_blocks: int = 0,
    time_ms: Callable[[int], float] = step_ms,
) -> list[Counts]:
    """Return the steps until all `requests` have ended; changes the requests. Raises ValueError if one cannot fit."""
    for request in requests:
        if request.blocks > blocks:
            raise ValueError(f"request {request.number} needs {request.blocks} blocks of {blocks}")
    future = sorted(requests, key=lambda request: (request.arrival_ms, request.number), reverse=True)
    waiting: list[tuple[tuple[int, float, int], Request]] = []
    running: list[Request] = []
    free, host_free = blocks, host_blocks
    now = 0.0
    steps: list[Counts] = []
    while future or waiting or running:
        if not waiting and not running:
            now = max(now, future[-1].arrival_ms)
        while future and future[-1].arrival_ms <= now:
            arrived = future.pop()
            heapq.heappush(waiting, (arrived.place, arrived))
        victims = _victims(running, now, time_ms)
        for victim in victims:
            running.remove(victim)
            free += victim.blocks
            held = -(-victim.in_kv // BLOCK)
            if held <= host_free:
                victim.swapped = True
                host_free -= held
            else:
                victim.in_kv = 0
            heapq.heappush(waiting, (victim.place, victim))
        while waiting and not victims and len(running) < max_batch_requests and waiting[0][1].blocks <= free:
            entering = heapq.heappop(waiting)[1]
            free -= entering.blocks
            if entering.swapped:
                entering.swapped = False
                host_free += -(-entering.in_kv // BLOCK)
            running.append(entering)
        work = _budget(running, now, max_batch_tokens)
        decode = sum(tokens for request, tokens in work if request.decoding)
        prefill = sum(tokens for _, tokens in work) - decode
        begun = sum(request.in_kv > 0 for request in running) + sum(not request.in_kv for request, _ in work)
        steps.append(Counts(decode, prefill, len(waiting) + len(running) - begun, begun))
        now += time_ms(decode + prefill)
        for request, tokens in work:
            request.in_kv += tokens
            if request.rest == 0:
                request.produced += 1
                request.last_token_ms = now
                if request.produced == request.max_new:
                    running.remove(request)
                    free += request.blocks
    return steps


def _victims(running: list[Request], now: float, time_ms: Callable[[int], float]) -> list[Request]:
    """Return the requests to preempt so that every request of class <= high keeps its TBT limit."""
    urgent = [request for request in running if request.decoding and request.tbt_ms and request.priority <= HIGH]
    if not urgent:
        return []
    due = min(request.last_token_ms + request.tbt_ms for request in urgent)
    decodes = sum(request.decoding for request in running)
    if due - (now + time_ms(decodes)) >= AT_RISK_MS:
        return []
    victims: list[Request] = []
    candidates = [request for request in running if request.priority >= NORMAL]
    for candidate in sorted(candidates, key=lambda one: (-one.priority, one.in_kv, -one.number)):
        if due - (now + time_ms(decodes)) > SAFE_MS:
            break
        victims.append(candidate)
        decodes -= candidate.decoding
    return victims


def _budget(running: list[Request], now: float, left: int) -> list[tuple[Request, int]]:
    """Return the requests of this step and their tokens: the decodes, then the chunks."""
    decoding = [request for request in running if request.decoding]
    decoding.sort(key=lambda one: (one.last_token_ms + one.tbt_ms if one.tbt_ms else float("inf"), one.number))
    work = [(request, 1) for request in decoding[:left]]
    left -= len(work)
    prefilling = [request for request in running if not request.decoding]
    for request in sorted(prefilling, key=lambda one: (one.priority, one.arrival_ms + one.ttft_ms - now, one.number)):
        chunk = _chunk(request.rest, left)
        if not chunk:
            break
        work.append((request, chunk))
        left -= chunk
    return work


def _chunk(rest: int, left: int) -> int:
    if rest < MULTIPLE:
        return rest if rest <= left else 0
    return min(rest, left, CHUNK) // MULTIPLE * MULTIPLE
