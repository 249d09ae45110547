"""Who shares an iteration: how many sequences, and how much of a prompt?"""

from __future__ import annotations


class WholePrefill:
    """Iteration-level batching with whole prompts (Orca): up to max_bs of those that are not in flight, by arrival.

    A prompt waits for a step with room for all of it; the first of a step does not wait but is cut at the worker's
    max_step_tokens, and goes on in the next steps, so that a prompt longer than that runs too.
    """

    def seats(self, sequences: int, most: int, microbatches: int) -> int:
        return -(-most // microbatches)

    def chunk(self, rest: int, left: int, first: bool) -> int:
        return rest if rest <= left else left if first else 0


class Chunked:
    """Prompts in chunks of what the decodes leave of the budget (Sarathi); microbatches share evenly."""

    def seats(self, sequences: int, most: int, microbatches: int) -> int:
        return max(-(-min(sequences, most) // microbatches), 1)

    def chunk(self, rest: int, left: int, first: bool) -> int:
        return min(rest, left)
