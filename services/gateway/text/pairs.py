"""Turn two texts into the prompt of a model that scores how well they belong together.

An encoder takes the tokenizer's form of a pair. A decoder in the form of Qwen3-Reranker is asked for yes or no, in the
words of its model card; its score is that of yes beside no at the last token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from services.gateway.text.chat_template import ChatTemplate
from shared.errors import ModelError
from shared.text.tokenizer import BoundedTokenizer

HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Of the model card (huggingface.co/Qwen/Qwen3-Reranker-0.6B)."""
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
LABELS = ("yes", "no")
JUDGE = "Qwen3ForCausalLM"


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt of two texts. segment: where the second begins, for a model that tells them apart; else 0."""

    ids: list[int]
    segment: int = 0


class Pairs(ABC):
    """How a model takes pairs. label_ids: of a decoder, those of yes and no. raw: scores are no probabilities."""

    label_ids: tuple[int, ...] = ()
    raw: bool = False

    @abstractmethod
    def encode(self, query: str, document: str, instruction: str) -> Pair:
        """Return the prompt. instruction: empty for the model's own. Raise TokenizerError."""


class CrossEncoder(Pairs):
    """An encoder with a head of one label. It takes no instruction."""

    def __init__(self, config: dict[str, Any], path: str, tokenizer: BoundedTokenizer) -> None:
        """Raise ModelError for a function of scores that is neither the sigmoid nor none."""
        settings = config.get("sentence_transformers")
        named = settings.get("activation_fn") if isinstance(settings, dict) else None
        name = str(named or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
        if name not in ("Sigmoid", "Identity"):
            raise ModelError(f"{path}: activation_fn {name[:60]!r} is not supported; only Sigmoid and Identity are")
        self.raw = name == "Identity"
        self._tokenizer = tokenizer

    def encode(self, query: str, document: str, instruction: str) -> Pair:
        return Pair(*self._tokenizer.encode_pair(query, document))


class Judge(Pairs):
    """A decoder that answers yes or no. Control tokens that texts spell do not count: no text ends its own part."""

    def __init__(self, tokenizer: BoundedTokenizer, chat: ChatTemplate, label_ids: tuple[int, ...]) -> None:
        self.label_ids = label_ids
        self._head, self._tail = (tokenizer.encode(text, add_special_tokens=False) for text in (HEAD, TAIL))
        self._chat = chat

    def encode(self, query: str, document: str, instruction: str) -> Pair:
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return Pair([*self._head, *self._chat.encode_plain(text), *self._tail])


def judge_of(architecture: str, tokenizer: BoundedTokenizer, chat: ChatTemplate) -> Judge | None:
    """Return how a decoder scores pairs; None for one that is not in the form of Qwen3-Reranker."""
    ids = (tokenizer.library.token_to_id(token) for token in (*LABELS, *MARKS))
    known_ids = [id_ for id_ in ids if id_ is not None]
    if architecture != JUDGE or len(known_ids) < len(LABELS) + len(MARKS):
        return None
    return Judge(tokenizer, chat, tuple(known_ids[: len(LABELS)]))
