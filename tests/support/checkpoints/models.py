"""Random models in Hugging Face form and what transformers answers for them: the oracle of every end-to-end test.

The weights are scaled so that logits are far apart; where a test demands equal tokens, every step of the reference's
greedy run keeps a gap of more than MIN_GAP between its two best logits, and that is asserted here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.pytorch_utils import Conv1D

from services.gateway.text.detokenizer import BYTE_OF

MIN_GAP = 1e-3
VOCAB = 320
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


_IDS = {"vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
_LLAMA = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_OPT = {name: value for name, value in _LLAMA.items() if name not in ("intermediate_size", "num_key_value_heads")}
_GPT2 = {**_IDS, "n_embd": 64, "n_layer": 2, "n_head": 4}
_QWEN_MOE = {**_LLAMA, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3}
_GEMMA = {**_LLAMA, "head_dim": 24, "num_hidden_layers": 3, "query_pre_attn_scalar": 20}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, _LLAMA),
    "mistral": (MistralConfig, {**_LLAMA, "sliding_window": None}),
    "qwen2": (Qwen2Config, _LLAMA),
    "qwen3": (Qwen3Config, {**_LLAMA, "head_dim": 24}),
    "mixtral": (MixtralConfig, {**_LLAMA, "num_local_experts": 4}),
    "qwen2_moe": (Qwen2MoeConfig, {**_QWEN_MOE, "shared_expert_intermediate_size": 80}),
    "qwen3_moe": (Qwen3MoeConfig, {**_QWEN_MOE, "head_dim": 24}),
    "gpt_oss": (GptOssConfig, {**_LLAMA, "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "gemma": (GemmaConfig, {**_LLAMA, "head_dim": 24}),
    "gemma2": (Gemma2Config, _GEMMA),
    "gemma3": (Gemma3TextConfig, _GEMMA),
    "gemma3_and_images": (lambda **text: Gemma3Config(text_config=text, vision_config=_VISION), _GEMMA),
    "gpt2": (GPT2Config, {**_GPT2, "n_positions": 256}),
    "bloom": (BloomConfig, {**_IDS, "hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": 256}),
    "opt": (OPTConfig, {**_OPT, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": (PhiConfig, _LLAMA),
    "phi3": (Phi3Config, _LLAMA),
    "neox": (GPTNeoXConfig, {**_OPT, "intermediate_size": 96}),
}


def make_llama(
    path: Path,
    seed: int = 0,
    requests: int = 4,
    prompt_tokens: tuple[int, int] = (2, 60),
    output_tokens: int = 24,
    **overrides: Any,
) -> Reference:
    """Writes a small random model with a byte-level tokenizer and a chat template.

    Returns its Reference with `requests` prompts of mixed lengths (the closed range prompt_tokens) and their greedy
    outputs; the gap of every one of them is asserted. `overrides` are fields of the config, and: kind (a key of
    _KINDS), dtype (on disk), shards (number of files, about).
    """
    kind, dtype, shards = overrides.pop("kind", "llama"), overrides.pop("dtype", "float32"), overrides.pop("shards", 1)
    make_config, fields = _KINDS[kind]
    config = make_config(**(fields | overrides))
    model = _random_model(config, seed).to(getattr(torch, dtype))
    size = sum(p.nbytes for p in model.parameters())
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, max_shard_size=size + 1 if shards == 1 else size // shards)
    _write_tokenizer(path, getattr(config.get_text_config(), "max_position_embeddings", 256))
    found = Reference(path)
    cases = found.cases(requests, prompt_tokens, output_tokens, seed)
    found.prompts, found.outputs = [case.prompt for case in cases], [case.tokens for case in cases]
    return found


def random_prompts(count: int, lengths: tuple[int, int], seed: int, vocab: int = VOCAB) -> list[list[int]]:
    """`count` prompts of random ids, lengths in the closed range."""
    rng = np.random.default_rng(seed)
    low, high = lengths
    return [rng.integers(0, vocab, rng.integers(low, high + 1)).tolist() for _ in range(count)]


@dataclass(frozen=True)
class Case:
    """A prompt and the reference's greedy tokens."""

    prompt: list[int]
    tokens: list[int]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute in this thread alone: on a busy machine, threads that wait for each other at every small operation take
    twenty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Reference:
    """transformers in float32 on one model directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prompts: list[list[int]] = []
        self.outputs: list[list[int]] = []
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.vocab = int(self.model.config.get_text_config().vocab_size)

    @torch.inference_mode()
    @one_thread()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] float32."""
        logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    @torch.inference_mode()
    @one_thread()
    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[float]]:
        """Greedy tokens of each prompt and, for each, the smallest gap between the two best logits on the way.

        Right-padded and computed anew for every token: with causal attention what stands behind a row does not
        touch it, so no cache and no mask of the reference can be wrong.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        rows = torch.arange(len(prompts))
        ids = torch.zeros(len(prompts), int(lengths.max()) + new_tokens, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        gaps = torch.full((len(prompts),), torch.inf)
        for step in range(new_tokens):
            width = int(lengths.max()) + step
            logits = self.model(ids[:, :width], use_cache=False).logits[rows, lengths + step - 1]
            best = logits.topk(2)
            gaps = torch.minimum(gaps, best.values[:, 0] - best.values[:, 1])
            ids[rows, lengths + step] = best.indices[:, 0]
        return [ids[r, len(p) : len(p) + new_tokens].tolist() for r, p in enumerate(prompts)], gaps.tolist()

    def cases(self, count: int, lengths: tuple[int, int], new_tokens: int, seed: int) -> list[Case]:
        """Prompts with greedy runs that keep their gap, with the answers; asserts the gap of what is returned."""
        found: list[Case] = []
        for attempt in range(8):
            prompts = random_prompts(count, lengths, seed + 7919 * attempt, self.vocab)
            answers, gaps = self.run(prompts, new_tokens)
            kept = [Case(p, a) for p, a, gap in zip(prompts, answers, gaps, strict=True) if gap > MIN_GAP]
            found += kept[: count - len(found)]
            if len(found) == count:
                return found
        raise AssertionError(f"fewer than {count} prompts of seed {seed} keep a gap over {MIN_GAP}")


def _random_model(config: Any, seed: int) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    config = config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    turned = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    is_gemma = type(model).__name__.startswith("Gemma")
    # Tied and ungated models repeat their last token unless the layers have more of a say than the embedding.
    gain, spread = (1.2, 8.0) if hasattr(config, "rms_norm_eps") else (6.0, 4.0)
    if is_gemma:
        gain, spread = 6.0, 0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and name.endswith(".weight"):
                # Every matrix keeps its input's size; the output matrix spreads logits over about +-20.
                is_embedding = isinstance(model.get_submodule(name.removesuffix(".weight")), torch.nn.Embedding)
                scale = 1.0 if is_embedding else gain / weight.shape[0 if name in turned else 1] ** 0.5
                if weight is model.get_output_embeddings().weight:
                    scale = spread / config.hidden_size**0.5
                weight.normal_(0.0, scale, generator=generator)
            elif weight.ndim == 3:  # the experts of a layer
                weight.normal_(0.0, gain / weight.shape[-1] ** 0.5, generator=generator)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.3, generator=generator)
            else:
                weight.normal_(0.0 if is_gemma else 1.0, 0.1, generator=generator)
    return model


def _write_tokenizer(path: Path, context: int) -> None:
    """Ids 0..255 are the bytes, then the special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "add_bos_token": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
