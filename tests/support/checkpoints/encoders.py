"""Random encoders in Hugging Face form with what sentence-transformers writes beside them.

The oracle is transformers in float32, pooled by the formulas of sentence_transformers/models/Pooling.py (a mean over
the tokens of the text, or the first token's row) and Normalize.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.support.checkpoints.models import one_thread

VOCAB = 320
PAD, CLS, SEP, UNK = 1, 2, 3, 4
WORDS = ["whale", "orca", "pod", "sea", "the", "a", "swims", "sings", "##s", "##ing", "deep", "far"]
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 130, "pad_token_id": PAD, "bos_token_id": CLS, "eos_token_id": SEP,
}  # fmt: skip
_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (BertConfig, {**_SMALL, "type_vocab_size": 2, "max_position_embeddings": 128}),
    "roberta": (RobertaConfig, {**_SMALL, "type_vocab_size": 1}),
    "xlm_roberta": (XLMRobertaConfig, {**_SMALL, "type_vocab_size": 1}),
}
KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class EncoderReference:
    """transformers on one directory. `has_types`: whether the second text of a pair has type 1."""

    path: Path
    model: Any
    pooling: str
    normalize: bool
    has_types: bool

    @torch.inference_mode()
    @one_thread()
    def vectors(self, prompts: list[list[int]]) -> np.ndarray:
        """[prompts, hidden] float32."""
        found = []
        for prompt in prompts:
            rows = self.model(torch.tensor([prompt])).last_hidden_state[0]
            vector = rows[0] if self.pooling == "cls" else rows.mean(0)
            found.append(torch.nn.functional.normalize(vector, dim=0) if self.normalize else vector)
        return torch.stack(found).numpy()

    @torch.inference_mode()
    @one_thread()
    def logits(self, pairs: list[tuple[list[int], int]]) -> np.ndarray:
        """[pairs] float32. Of each pair the ids, and where the second text begins."""
        found = []
        for ids, segment in pairs:
            types = [int(self.has_types and 0 < segment <= at) for at in range(len(ids))]
            found.append(self.model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0, 0])
        return torch.stack(found).numpy()


def make_encoder(
    path: Path, kind: str, pooling: str = "", normalize: bool = True, scores: bool = False, seed: int = 0, **fields: Any
) -> EncoderReference:
    """Write a model. pooling: empty writes no modules.json. scores: with a head of one label."""
    make_config, small = _KINDS[kind]
    config = make_config(**(small | ({"num_labels": 1} if scores else {}) | fields))
    of: Any = AutoModelForSequenceClassification if scores else AutoModel
    model = of.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 1.0 if "embeddings" in name else 2.0 / weight.shape[-1] ** 0.5
            weight.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, min(scale, 0.5), generator=generator)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path, has_types=kind == "bert")
    if pooling:
        modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        listed = [
            {"idx": at, "path": f"{at}_{name}" if at else "", "type": f"sentence_transformers.models.{name}"}
            for at, name in enumerate(modules)
        ]
        (path / "modules.json").write_text(json.dumps(listed))
        (path / "1_Pooling").mkdir(exist_ok=True)
        modes = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
        switched = {name: kind == pooling for kind, name in modes.items()}
        (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **switched}))
    # The one that was written, as rounding and defaults of files are a part of what is tested.
    loaded = of.from_pretrained(path, dtype=torch.float32).eval()
    return EncoderReference(path, loaded, pooling or "mean", normalize and bool(pooling), kind == "bert")


def write_tokenizer(path: Path, has_types: bool) -> None:
    """WordPiece of a few words and all letters; pairs as BERT's, or as RoBERTa's with two separators and one type."""
    pieces = ["[UNUSED]", "[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS]
    letters = [chr(code) for code in range(33, 127)]
    pieces += [piece for piece in [*letters, *(f"##{letter}" for letter in letters)] if piece not in pieces]
    tokenizer = Tokenizer(models.WordPiece(vocab={p: at for at, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")])
    second = ["$B:1", "[SEP]:1"] if has_types else ["[SEP]:0", "$B:0", "[SEP]:0"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=" ".join(["[CLS]", "$A", "[SEP]", *second]),
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.enable_truncation(8)  # as models have it, for their authors' use: a server that cuts would be wrong
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
