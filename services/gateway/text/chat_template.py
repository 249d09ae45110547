"""Turn chat messages into token ids with the chat template of the model.

What users write is never parsed as control tokens. Control tokens inside user text are hidden from the template behind
unguessable names, and the rendered text is encoded by a twin of the tokenizer that knows every control token under
another unguessable name only: control tokens of the template are renamed, user text is put back as plain text.
`Renderer` is the gateway's end of the process that renders (template_process.py).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import orjson

from services.gateway.errors import invalid, untokenizable
from services.gateway.text.template_process import FAILED, MAX_CHARS, REFUSED, environment
from shared.processes.jail import Jail, JailError
from shared.text.tokenizer import BoundedTokenizer, TokenizerError

MEMORY_BYTES = 256 << 20
"""Of the process, all together. A conversation of 4 MiB takes some 50."""
PATIENCE = 10
"""An answer may take so many times the template's processor time: the machine may be busy."""


class RenderError(Exception):
    """A template did what it may not, or could not render."""


class Renderer:
    """One template. `render` blocks and may be called by several threads; one at a time is served."""

    def __init__(self, source: str, timeout_s: float) -> None:
        """Raise jinja2.TemplateSyntaxError. Nothing of the template runs, or is folded, in this process."""
        environment().parse(source)
        first = orjson.dumps({"source": source, "seconds": timeout_s, "bytes": MEMORY_BYTES})
        self.jail = Jail("services.gateway.text.template_process", first, PATIENCE * timeout_s, 4 * MAX_CHARS + 1)

    @property
    def pid(self) -> int | None:
        """Return the pid of the process, if it runs."""
        return self.jail.pid

    def render(self, **context: Any) -> str:
        """Return the text. `context`: JSON values.

        Raise jinja2.TemplateError with the template's words, RenderError for all else.
        """
        try:
            answer = self.jail.ask(orjson.dumps(context))
        except JailError as error:
            raise RenderError(f"the process that renders it {error}") from error
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == REFUSED:
            raise jinja2.TemplateError(text)
        if kind == FAILED:
            raise RenderError(text)
        return text

    def close(self) -> None:
        """End the process."""
        self.jail.close()


Message = Mapping[str, Any]
RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self", "raise_exception",
    "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token",
})  # fmt: skip
"""Names of the context and of its functions."""


class ChatTemplate:
    """The template of a model, rendered by a process apart, and the twin tokenizer. `encode` blocks."""

    def __init__(
        self, source: str | None, tokenizer: BoundedTokenizer, names: Mapping[str, str], timeout_s: float
    ) -> None:
        """source: None for a model without a template. names: bos_token, eos_token, ... as the template may use them.
        Raise jinja2.TemplateSyntaxError, ModelError.
        """
        self._template = None if source is None else Renderer(source, timeout_s)
        self._names = dict(names)
        added = tokenizer.library.get_added_tokens_decoder()
        self._specials = {token.content: id_ for id_, token in added.items() if token.special and token.content}
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        nonce = secrets.token_hex(12)
        self._new_names = {content: f"\ue000{nonce}:{id_}\ue001" for content, id_ in self._specials.items()}
        self._twin, self._original_id = _twin(tokenizer, self._new_names)
        self._special_ids = frozenset(self._specials.values())
        if source is not None:
            self._twin.encoders.make_ready()

    def encode(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Message] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        continues: bool = False,
    ) -> list[int]:
        """Return token ids of a conversation. Raise ApiError(400) with the template's words when it refuses, and where
        there is no template.

        tools: the functions that the model may call, in OpenAI's form. variables: what else the template may read, none
        of RESERVED. continues: end the text behind the content of the final message, for the model to go on with.
        """
        if self._template is None:
            raise invalid("messages", "this model has no chat template; use /v1/completions", "no_chat_template")
        hiding = _HiddenTokens(self._pattern)
        shown_messages = [dict(message) for message in messages]
        if continues:
            shown_messages[-1]["content"] += hiding.end
        context = hiding.hide({"messages": shown_messages, "tools": list(tools) or None, **variables})
        text = self._render(self._template, {**context, "add_generation_prompt": add_generation_prompt})
        if continues:
            text, separator, _ = text.rpartition(hiding.end)
            if not separator:
                field = "continue_final_message"
                raise invalid(
                    field, f"{field}: the model's chat template does not show the final message; leave it out"
                )
        count = 0
        if self._pattern is not None:
            text, count = self._pattern.subn(lambda match: self._new_names[match.group()], text)
        try:
            ids = self._twin.encode(hiding.show(text), add_special_tokens=False)
        except TokenizerError as error:
            raise untokenizable("messages", error) from error
        ids = [self._original_id.get(id_, id_) for id_ in ids]
        if hiding.is_used and sum(id_ in self._special_ids for id_ in ids) != count:
            text = "a message contains the text of a control token that cannot be encoded as text; leave that text out"
            raise invalid("messages", text)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return token ids of a text in which no control token counts. Raise TokenizerError."""
        return [self._original_id.get(id_, id_) for id_ in self._twin.encode(text, add_special_tokens=False)]

    @property
    def exists(self) -> bool:
        """Whether the model has a template."""
        return self._template is not None

    def close(self) -> None:
        """End the processes. Long conversations are no longer encoded."""
        self._twin.encoders.close()
        if self._template is not None:
            self._template.close()

    def _render(self, template: Renderer, context: dict[str, Any]) -> str:
        try:
            return template.render(**{"documents": None, **context, **self._names})
        except jinja2.TemplateError as error:
            raise invalid("messages", f"the model's chat template refused the messages: {error}") from error
        except Exception as error:  # a template is a program; it must not bring the gateway down
            text = f"the model's chat template cannot render the messages: {error}; send plainer ones, or a prompt"
            raise invalid("messages", text) from error


class _HiddenTokens:
    """Hide control tokens of user text behind unguessable names, for one request."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._nonce = secrets.token_hex(12)
        self.end = f"\ue000{self._nonce}-end\ue001"
        self._texts: list[str] = []

    @property
    def is_used(self) -> bool:
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


def _twin(tokenizer: BoundedTokenizer, new_names: Mapping[str, str]) -> tuple[BoundedTokenizer, dict[int, int]]:
    """Return a tokenizer that knows control tokens by their new names only, and the map from its ids to the model's."""
    original = {}

    def rename(source: dict[str, Any]) -> None:
        source["post_processor"] = None
        for token in source["added_tokens"]:
            name = token["content"]
            if token["special"] and name in new_names:
                token["content"] = new_names[name]
            original[token["content"]] = token["id"]

    twin = tokenizer.change(rename)
    ids = [(twin.library.token_to_id(content), id_) for content, id_ in original.items()]
    return twin, {theirs: ours for theirs, ours in ids if theirs is not None and theirs != ours}
