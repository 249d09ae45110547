"""The structs of src/ops.h as ctypes sees them. Their sizes are compared with the library's when it is loaded."""

from __future__ import annotations

from ctypes import POINTER, Structure, Union, c_float, c_int32, c_int64, c_void_p

ROWS_TOKENS, ROWS_SAMPLES = -1, -2
FLOAT32, BFLOAT16 = 0, 1
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
GATED_ACTIVATIONS = {**ACTIVATIONS, "clamped_swiglu": 4}
SOFTCAP = 5


class Step(Structure):
    _fields_ = (
        ("tokens_count", c_int32),
        ("samples_count", c_int32),
        ("sequences", c_int32),
        ("table_stride", c_int32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("context", c_void_p),
        ("tables", c_void_p),
        ("write_blocks", c_void_p),
        ("write_offsets", c_void_p),
        ("sample_rows", c_void_p),
    )


class Pool(Structure):
    _fields_ = (
        ("blocks", c_void_p),
        ("block_bytes", c_int64),
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_dim", c_int32),
        ("head_stride", c_int32),
        ("dtype", c_int32),
        ("codes", c_int32),
    )


class LinearArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("out_stride", c_int32),
        ("dtype", c_int32),
        ("weight_format", c_int32),
        ("out_dtype", c_int32),
    )


class EmbedArgs(Structure):
    _fields_ = (
        ("table", c_void_p),
        ("places", c_void_p),
        ("out", c_void_p),
        ("hidden", c_int32),
        ("vocab", c_int32),
        ("dtype", c_int32),
        ("table_dtype", c_int32),
        ("packed", c_int32),
        ("scale", c_float),
    )


class NormArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("hidden", c_int32),
        ("dtype", c_int32),
        ("layer_norm", c_int32),
        ("eps", c_float),
    )


class GatedArgs(Structure):
    _fields_ = (("x", c_void_p), ("out", c_void_p), ("size", c_int32), ("dtype", c_int32), ("activation", c_int32))


class ActivateArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("size", c_int32),
        ("dtype", c_int32),
        ("activation", c_int32),
        ("cap", c_float),
    )


class AddArgs(Structure):
    _fields_ = (("residual", c_void_p), ("x", c_void_p), ("size", c_int32), ("dtype", c_int32))


class SelectArgs(Structure):
    _fields_ = (("x", c_void_p), ("out", c_void_p), ("size", c_int32), ("dtype", c_int32))


class RopeArgs(Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("q", c_void_p),
        ("rope", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("pool", POINTER(Pool)),
        ("heads", c_int32),
        ("layer", c_int32),
        ("rotary", c_int32),
        ("dtype", c_int32),
        ("eps", c_float),
    )


class AttentionArgs(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("out", c_void_p),
        ("slopes", c_void_p),
        ("sinks", c_void_p),
        ("pool", POINTER(Pool)),
        ("heads", c_int32),
        ("layer", c_int32),
        ("dtype", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("causal", c_int32),
    )


class SampleArgs(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("tokens", c_void_p),
        ("status", c_void_p),
        ("logprobs", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seed", c_void_p),
        ("position", c_void_p),
        ("want_logprob", c_void_p),
        ("bias_start", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("banned_start", c_void_p),
        ("banned_ids", c_void_p),
        ("mask_row", c_void_p),
        ("mask_words", c_void_p),
        ("history_start", c_void_p),
        ("history_ids", c_void_p),
        ("history_is_output", c_void_p),
        ("presence", c_void_p),
        ("frequency", c_void_p),
        ("repetition", c_void_p),
        ("vocab", c_int32),
        ("greedy", c_int32),
    )


class CopyArgs(Structure):
    _fields_ = (
        ("source", c_void_p),
        ("target", c_void_p),
        ("from_", c_void_p),
        ("to", c_void_p),
        ("bytes", c_int64),
    )


class RouteArgs(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("weights", c_void_p),
        ("places", c_void_p),
        ("order", c_void_p),
        ("starts", c_void_p),
        ("experts", c_int32),
        ("top_k", c_int32),
        ("normalize", c_int32),
    )


class ExpertWeight(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("weight_format", c_int64))


class ExpertsArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("weights", POINTER(ExpertWeight)),
        ("order", c_void_p),
        ("starts", c_void_p),
        ("out", c_void_p),
        ("experts", c_int32),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("out_stride", c_int32),
        ("dtype", c_int32),
    )


class CombineArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("weights", c_void_p),
        ("places", c_void_p),
        ("shared", c_void_p),
        ("shared_logits", c_void_p),
        ("out", c_void_p),
        ("top_k", c_int32),
        ("size", c_int32),
        ("dtype", c_int32),
    )


class LowRankUp(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("first_output", c_int32),
        ("outputs", c_int32),
        ("first_rank", c_int32),
        ("rank", c_int32),
    )


class LowRankPair(Structure):
    _fields_ = (
        ("down", c_void_p),
        ("ups", POINTER(LowRankUp)),
        ("count", c_int32),
        ("rank", c_int32),
    )


class LowRankPairs(Structure):
    _fields_ = (("pairs", POINTER(LowRankPair)), ("count", c_int64))


class AdapterRows(Structure):
    _fields_ = (("adapters", c_void_p), ("starts", c_void_p), ("order", c_void_p), ("count", c_int64))


class LowRankArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("pairs", POINTER(LowRankPairs)),
        ("adapters", POINTER(AdapterRows)),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("dtype", c_int32),
    )


class Args(Union):
    _fields_ = (
        ("linear", LinearArgs),
        ("embed", EmbedArgs),
        ("norm", NormArgs),
        ("gated", GatedArgs),
        ("activate", ActivateArgs),
        ("add", AddArgs),
        ("select", SelectArgs),
        ("rope", RopeArgs),
        ("attention", AttentionArgs),
        ("sample", SampleArgs),
        ("copy", CopyArgs),
        ("route", RouteArgs),
        ("experts", ExpertsArgs),
        ("combine", CombineArgs),
        ("low_rank", LowRankArgs),
    )


class Command(Structure):
    """`rows` is a number, ROWS_TOKENS, ROWS_SAMPLES or what `times` makes of them."""

    _fields_ = (("op", c_int32), ("rows", c_int32), ("args", Args))


ARGS = {
    LinearArgs: (1, "linear"),
    EmbedArgs: (2, "embed"),
    NormArgs: (3, "norm"),
    GatedArgs: (4, "gated"),
    ActivateArgs: (5, "activate"),
    AddArgs: (6, "add"),
    SelectArgs: (7, "select"),
    RopeArgs: (8, "rope"),
    AttentionArgs: (9, "attention"),
    SampleArgs: (10, "sample"),
    CopyArgs: (11, "copy"),
    RouteArgs: (12, "route"),
    ExpertsArgs: (13, "experts"),
    CombineArgs: (14, "combine"),
    LowRankArgs: (15, "low_rank"),
}
"""Struct -> number of the operation (Op of ops.h) and its member of the union."""

NAMES = dict(ARGS.values())
"""Number of an operation -> its name, for profiles."""


def times(rows: int, count: int) -> int:
    """Return `count` times so many rows, a number or one of the two symbols."""
    return rows * count if rows >= 0 else rows - 2 * (count - 1)


def resolve(rows: int, tokens: int, samples: int) -> int:
    """Return the rows of a command in a step with these counts of tokens and samples; the inverse of `times`."""
    return rows if rows >= 0 else (1 - rows) // 2 * (tokens if rows % 2 else samples)


def command(rows: int, args: Structure) -> Command:
    """Return the command that runs `args` on so many rows."""
    op, member = ARGS[type(args)]
    made = Command(op, rows)
    setattr(made.args, member, args)
    return made
