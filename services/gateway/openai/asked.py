"""What a body asks of its choices beside text: log-probabilities, and the best of several. Used by validate.py."""

from __future__ import annotations

from services.gateway.errors import invalid
from services.gateway.openai.bodies import ChatBody, CompletionBody, GenerationBody
from shared.logprobs import record_bytes

MOST_RECORD_BYTES = 64 << 20
"""What the log-probabilities of one request may take in Redis."""


def logprobs_asked(body: GenerationBody) -> int | None:
    """How many most likely tokens are told beside each sampled one; None: no log-probabilities. Raises ApiError."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not isinstance(body, ChatBody):
        return None
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", f"top_logprobs needs logprobs to be true; got {body.top_logprobs} without it")
    return (body.top_logprobs or 0) if body.logprobs else None


def choices_asked(body: GenerationBody) -> tuple[int, int]:
    """Choices of each prompt that run, and how many of them, the best, are told; 0: all. Raises ApiError."""
    n = body.n or 1
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    if best_of is None or best_of == n:
        return n, 0
    if best_of < n:
        raise invalid("best_of", f"best_of must be at least n, {n}; got {best_of}")
    if body.stream:
        raise invalid("best_of", f"best_of above n cannot be streamed: which is best shows at the end; got {best_of}")
    return best_of, n


def check_records(choices: int, max_tokens: int, wanted: int) -> None:
    """Raises ApiError for records (shared/logprobs.py) of so many choices that could take too much of Redis."""
    size = choices * max_tokens * record_bytes(wanted)
    if size > MOST_RECORD_BYTES:
        raise invalid(
            "logprobs",
            f"log-probabilities of {choices} choices x {max_tokens} tokens may take {size >> 20} MiB of Redis; "
            f"a request gets at most {MOST_RECORD_BYTES >> 20}: ask for fewer choices, tokens or most likely ones",
        )
