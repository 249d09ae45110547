"""The sizes at which operations are timed: those of a model for the machine."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a decoder like Llama."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    context: int  # positions

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes of a layer's experts, `top_k` of which a row is given to."""

    name: str
    hidden: int
    experts: int
    top_k: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """`rows` new tokens of each of `sequences`; each context then has `context` tokens."""

    sequences: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases of one run."""

    model: Model
    rotated_bytes: int  # of operands in turn, past every cache
    most_copies: int
    decodes: tuple[tuple[int, int], ...]  # sequences, tokens of context
    prompts: tuple[Prompt, ...]
    rows: tuple[int, ...]  # of an iteration
    linear_rows: tuple[int, ...]  # of a matrix product
    sampled: tuple[int, ...]  # rows that sample
    swapped_blocks: int
    flex: tuple[str, ...] = ()  # cases beside which FlexAttention is compiled, which takes a while

    def copies(self, case_bytes: float) -> int:
        """Return the number of copies of the operands of one call."""
        return max(2, min(self.most_copies, -(-self.rotated_bytes // max(1, int(case_bytes)))))


LLAMA_8B = Model("Llama-8B", 4096, 32, 8, 128, 14336, 128256, 32, 32768)
QWEN_600M = Model("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936, 28, 32768)
LLAMA_30M = Model("llama-30m", 512, 8, 4, 64, 1408, 8192, 8, 2048)
TINY = Model("tiny", 128, 4, 2, 64, 128, 512, 2, 256)

QWEN_30B = Mixture("Qwen3-30B-A3B", 2048, 128, 8, 768)
MIXTRAL = Mixture("Mixtral-8x7B", 4096, 8, 2, 14336)
SMALL_MIXTURE = Mixture("small", 128, 8, 2, 64)

GPU = Plan(
    LLAMA_8B,
    rotated_bytes=4 << 30,
    most_copies=256,
    decodes=((1, 1024), (8, 4096), (32, 2048), (64, 1024), (128, 1024), (8, 32768)),
    prompts=(Prompt(1, 512, 512), Prompt(1, 2048, 2048), Prompt(1, 8192, 8192), Prompt(1, 2048, 32768)),
    rows=(64, 256, 4096),
    linear_rows=(64, 256, 4096),
    sampled=(64, 256),
    swapped_blocks=256,
    flex=("64 x 1024", "1 x 2048 of 2048"),
)
CPU = Plan(
    LLAMA_30M,
    rotated_bytes=256 << 20,
    most_copies=64,
    decodes=((1, 512), (8, 512), (32, 512), (32, 1024)),
    prompts=(Prompt(1, 128, 128), Prompt(1, 512, 512), Prompt(1, 128, 1024)),
    rows=(1, 32, 512),
    linear_rows=(1, 2, 4, 8, 16, 32, 128, 512),
    sampled=(1, 32),
    swapped_blocks=64,
    flex=("32 x 512",),
)
QUICK = Plan(
    TINY,
    rotated_bytes=1,
    most_copies=2,
    decodes=((2, 33),),
    prompts=(Prompt(1, 17, 40),),
    rows=(3,),
    linear_rows=(3,),
    sampled=(2,),
    swapped_blocks=2,
)
