"""Chat messages to token ids, by the model's own template.

What users write is never parsed as control tokens. Control tokens inside user text are hidden from the template behind
unguessable names, and the rendered text is encoded by a twin of the tokenizer that knows every control token under
another unguessable name only: what the template wrote is renamed, what the user wrote is put back as plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import orjson
from tokenizers import Tokenizer

from services.gateway.errors import invalid
from services.gateway.text.template_renderer import Renderer

Message = Mapping[str, Any]


class ChatTemplate:
    """One template, which a process of its own renders, and the twin tokenizer. `encode` blocks."""

    def __init__(self, source: str, tokenizer: Tokenizer, names: Mapping[str, str], timeout_s: float) -> None:
        """`names`: bos_token, eos_token, ... as the template may use them. Raises jinja2.TemplateSyntaxError."""
        self._template = Renderer(source, timeout_s)
        self._names = dict(names)
        added = tokenizer.get_added_tokens_decoder()
        self._specials = {token.content: id_ for id_, token in added.items() if token.special and token.content}
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        nonce = secrets.token_hex(12)
        self._renamed = {content: f"\ue000{nonce}:{id_}\ue001" for content, id_ in self._specials.items()}
        self._twin, self._original_id = _twin(tokenizer, self._renamed)
        self._special_ids = frozenset(self._specials.values())

    def encode(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Message] = ()
    ) -> list[int]:
        """Token ids of a conversation. Raises ApiError(400) with the template's own words when it refuses.

        tools: the functions that the model may call, in OpenAI's form.
        """
        hidden = _Hidden(self._pattern)
        text = self._render(hidden.hide(list(messages)), hidden.hide(list(tools)), add_generation_prompt)
        written = 0
        if self._pattern is not None:
            text, written = self._pattern.subn(lambda match: self._renamed[match.group()], text)
        ids = self._twin.encode(hidden.show(text), add_special_tokens=False).ids
        ids = [self._original_id.get(id_, id_) for id_ in ids]
        if hidden.used and sum(id_ in self._special_ids for id_ in ids) != written:
            raise invalid("messages", "a message contains the text of a control token that cannot be encoded as text")
        return ids

    def close(self) -> None:
        """Ends the process."""
        self._template.close()

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
        except jinja2.TemplateError as error:
            raise invalid("messages", f"the model's chat template refused the messages: {error}") from error
        except Exception as error:  # a template is a program; whatever it does to these messages is no crash of ours
            raise invalid("messages", f"the model's chat template cannot render the messages: {error}") from error


class _Hidden:
    """Control tokens of user text behind names that nobody can guess, for one request."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._nonce = secrets.token_hex(12)
        self._texts: list[str] = []

    @property
    def used(self) -> bool:
        return bool(self._texts)

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._name, value) if self._pattern else value
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def show(self, text: str) -> str:
        if not self._texts:
            return text
        return re.sub(f"\ue000{self._nonce}-(\\d+)\ue001", lambda match: self._texts[int(match.group(1))], text)

    def _name(self, match: re.Match[str]) -> str:
        self._texts.append(match.group())
        return f"\ue000{self._nonce}-{len(self._texts) - 1}\ue001"


def _twin(tokenizer: Tokenizer, renamed: Mapping[str, str]) -> tuple[Tokenizer, dict[int, int]]:
    """A tokenizer that knows control tokens by their new names only, and the map from its ids to the model's."""
    source = orjson.loads(tokenizer.to_str())
    source["post_processor"] = None
    original = {}
    for token in source["added_tokens"]:
        name = token["content"]
        if token["special"] and name in renamed:
            token["content"] = renamed[name]
        original[token["content"]] = token["id"]
    twin = Tokenizer.from_str(orjson.dumps(source).decode())
    ids = [(twin.token_to_id(content), id_) for content, id_ in original.items()]
    return twin, {theirs: ours for theirs, ours in ids if theirs is not None and theirs != ours}
