"""How the sampler is launched, and the rows that it reads; the C side is src/sampler_params.cuh.

See `calls` for what a Call is.
"""

from __future__ import annotations

import numpy as np

from kernels.cuda.calls import Call, _filled, _some, _struct, _whole_warps

THREADS = 512  # sampler.cu
GROUP = 4  # ids that a thread reads at once

ROW = np.dtype(
    [
        ("seed", "u8"),
        ("position", "i8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("repetition", "f4"),
        ("top_k", "i4"),
        ("want_logprob", "i4"),
        ("slot", "i4"),  # whose last token the drawn one becomes; below zero: nobody's
        ("mask", "i4"),  # row of mask_words; below zero: every id is allowed
        ("first_bias", "i4"),
        ("end_bias", "i4"),
        ("first_banned", "i4"),
        ("end_banned", "i4"),
        ("first_history", "i4"),
        ("first_output", "i4"),  # in the history; the prompt's tokens come before
        ("end_history", "i4"),
    ],
    align=True,
)
"""How one row is sampled; first_*, end_*: its entries in the arrays of SAMPLER."""

SAMPLER = _struct(
    # logits [rows or more, vocab] float32; rows [rows] of ROW; the entries of all rows: bias_ids (equal ids of a row
    # side by side) and bias_values, banned_ids, history_ids; mask_words [masks, ceil(vocab / 32)]; room for as many
    # numbers as there are entries: bias_before and history_before float32, history_counts int32; last_tokens [slots]
    # int32; the results [rows]: tokens and status int32, logprobs float32.
    "logits rows bias_ids bias_values banned_ids history_ids mask_words "
    "bias_before history_before history_counts last_tokens tokens status logprobs",
    ("vocab", "i4"),
)


def sample(
    rows: int,
    vocab: int,
    logits: int,
    row_array: int,
    tokens: int,
    status: int,
    logprobs: int,
    last_tokens: int = 0,
    bias_ids: int = 0,
    bias_values: int = 0,
    banned_ids: int = 0,
    history_ids: int = 0,
    mask_words: int = 0,
    bias_before: int = 0,
    history_before: int = 0,
    history_counts: int = 0,
) -> Call:
    """One token of each row. An address is 0 where no row needs what lies there; edits change the logits."""
    entries = (bias_ids, bias_values, banned_ids, history_ids, mask_words, bias_before, history_before, history_counts)
    params = _filled(SAMPLER, (logits, row_array, *entries, last_tokens, tokens, status, logprobs, vocab))
    threads = _whole_warps(-(-vocab // GROUP), THREADS)
    return Call("sample", (_some(rows), 1, 1), (threads, 1, 1), 0, params)
