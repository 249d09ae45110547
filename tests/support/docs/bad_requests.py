"""HTTP requests that are refused: the rows of docs/bad-input.md, section by section.

What comes back is not written here: `python -m tests.support.docs.bad_input` asks a real gateway and writes the page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.checkpoints.tokenizers import CONTEXT
from tests.support.docs.bad_calls import USER

MAX_BODY = 200_000
CHAT = [{"role": "user", "content": "x"}]


@dataclass(frozen=True, slots=True)
class Sent:
    """One HTTP request. body: a JSON object (the model's name is put into it), or the bytes themselves."""

    path: str
    body: Mapping[str, Any] | bytes | None = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str = "user"  # its owner: see KEYS of tests/support/docs/bad_input.py; empty: none
    note: str = ""  # what the table says of it beside its body
    before: tuple[Sent, ...] = ()  # sent first, and served
    ops: bool = False  # to the ops port
    raw: bytes = b""  # if any, all that the client says on its connection


def completions(note: str = "", **body: Any) -> Sent:
    return Sent("/v1/completions", {"prompt": "x", **body}, note=note)


def chat(note: str = "", **body: Any) -> Sent:
    return Sent("/v1/chat/completions", {"messages": CHAT, **body}, note=note)


def responses(note: str = "", **body: Any) -> Sent:
    return Sent("/v1/responses", {"input": "x", **body}, note=note)


def messages(note: str = "", path: str = "", **body: Any) -> Sent:
    given = {"messages": CHAT} | ({} if path else {"max_tokens": 9})
    return Sent(f"/v1/messages{path}", given | body, note=note)


def blocks(role: str, *content: dict[str, Any]) -> Sent:
    return messages(messages=[{"role": role, "content": list(content)}])


def upload(note: str, *parts: tuple[str, str]) -> Sent:
    """Return an upload of parts (what stands behind `form-data; `, content)."""
    text = "".join(f"--x\r\nContent-Disposition: form-data; {head}\r\n\r\n{content}\r\n" for head, content in parts)
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    return Sent("/v1/files", f"{text}--x--\r\n".encode(), headers=headers, note=note)


def batches(**body: Any) -> Sent:
    """Return an order of a batch, which has no model."""
    written = json.dumps({"endpoint": "/v1/completions", "completion_window": "24h"} | body)
    return Sent("/v1/batches", written.encode(), note=f"`{written}`")


def _with_messages(*messages: dict[str, Any]) -> Sent:
    return Sent("/v1/chat/completions", {"messages": list(messages)})


def _tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def _allowed(mode: str, name: str) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": name}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool]}}


def _calling(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", **function}}]}


FIELDS = [
    completions(max_tokens=-1),
    completions(max_tokens=0),
    completions(max_tokens=1.5),
    completions(max_tokens=True),
    completions(max_tokens=CONTEXT),
    completions(prompt="x " * 600),
    completions(prompt="x" * 150_000),
    completions(prompt=""),
    completions(prompt=[]),
    completions(prompt=[[]]),
    completions(prompt=[1, -1]),
    completions(prompt=[1, 10**6]),
    completions(prompt=[1, "a"]),
    completions(prompt=["a", ""]),
    completions(prompt={"a": 1}),
    Sent("/v1/completions", {}),
    completions(temperature=2.1),
    completions(temperature="hot"),
    completions(top_p=0),
    completions(top_k=-2),
    completions(min_p=1.1),
    completions(n=0),
    completions(n=129),
    completions(prompt=["x"] * 65, n=2),
    completions(stop=["a"] * 17),
    completions(stop="a" * 257),
    completions(stop=""),
    completions(stop_token_ids=[1] * 9),
    completions(stop_token_ids=[10**6]),
    completions(seed=2**63),
    completions(min_tokens=17),
    completions(priority="urgent"),
    completions(deadline_ms=0),
    completions(logit_bias={"x": 1}),
    completions(logit_bias={"3": 101}),
    completions(presence_penalty=3),
    completions(stream_options={"include_usage": True}),
    completions(stream=True, stream_options={"x": 1}),
    completions(max_token=3),
    completions(logprobs=21),
    completions(logprobs=True),
    completions(logprobs=0, echo=True, stream=True),
    completions(prompt_logprobs=0, stream=True),
    completions(prompt_logprobs=21),
    completions(prompt=[[7] * 400] * 128, prompt_logprobs=20),
    completions(prompt=[7] * 400, prompt_logprobs=20, n=128),
    completions(top_logprobs=2),
    Sent("/v1/embeddings", {"input": ""}),
    Sent("/v1/embeddings", {"input": []}),
    Sent("/v1/embeddings", {"input": ["a", ""]}),
    Sent("/v1/embeddings", {"input": ["x"] * 129}),
    Sent("/v1/embeddings", {"input": [1, -1]}),
    Sent("/v1/embeddings", {"input": [[1], [-1]]}),
    Sent("/v1/embeddings", {"input": [5] * CONTEXT}),
    Sent("/v1/embeddings", {"input": "x", "dimensions": 0}),
    Sent("/v1/embeddings", {"input": "x", "prompt": "y"}),
    Sent("/v1/embeddings", {"input": "x", "encoding_format": "int8"}),
    Sent("/v1/embeddings", {"input": "x", "stream": True}),
    Sent("/v1/rerank", {"query": "x", "documents": []}),
    Sent("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": 0}),
    Sent("/v1/rerank", {"query": "x", "documents": ["y"]}),
    Sent("/v1/score", {"text_1": "x", "text_2": []}),
    completions(n=3, best_of=2),
    completions(best_of=2, stream=True),
    completions(prompt=["x"] * 65, best_of=2),
    completions(suffix="y"),
    chat(messages=[]),
    chat(messages=[{"role": "king", "content": "x"}]),
    chat(messages=[{"role": "user"}]),
    chat(messages=[{"role": "user", "content": []}]),
    chat(messages=[{"role": "user", "content": [{"type": "image", "text": "x"}]}]),
    chat(messages=[{"role": "user", "content": 3}]),
    chat(max_tokens=5, max_completion_tokens=6),
    chat(max_completion_tokens=600),
    chat(tools=[{"type": "function"}]),
    chat(tool_choice="required"),
    chat(functions=[{}]),
    chat(logprobs=1),
    chat(top_logprobs=3),
    chat(logprobs=True, top_logprobs=21),
    chat(response_format={"type": "xml"}),
    chat(guided_json={"type": "foo"}),
    completions(guided_regex="(a"),
    completions(guided_grammar="start: foo"),
    completions(guided_choice=[]),
    completions(guided_regex="a", guided_choice=["a"]),
    completions(guided_regex="a", ignore_eos=True),
    chat(audio={}),
    chat(prompt="x"),
    completions(model="gpt-4"),
    Sent("/v1/completions", {"model": None, "prompt": "x"}),
    completions(model=""),
    completions(max_tokens="16"),
    completions(temperature=-0.1),
    completions(top_p=1.01),
    completions(min_p=-0.5),
    completions(top_k=1.5),
    completions(repetition_penalty=0),
    completions(frequency_penalty=-2.5),
    completions(min_tokens=-1),
    completions(seed="seven"),
    completions(stream="yes"),
    completions(stop=[1]),
    completions(stop_token_ids=[-1]),
    completions(logit_bias={"999999": 1}),
    completions(logit_bias={str(token): 1 for token in range(301)}),
    completions(logit_bias=[1]),
    completions(ttft_slo_ms=0),
    completions(tbt_slo_ms=-5),
    completions(deadline_ms="soon"),
    completions(priority=1),
    completions(user="u" * 1025),
    completions(echo=True, max_tokens=0, stream=True),
    completions(echo=True, max_tokens=0, background=True),
    completions(background=True, stream=True),
    completions(background="yes"),
    completions(best_of=0),
    completions(best_of=129),
    completions(logprobs=-1),
    completions(n="2"),
    completions(return_token_ids=1),
    completions(messages=CHAT),
]
CHAT_FIELDS = [
    chat(max_completion_tokens=0),
    chat(temperature="hot"),
    chat(metadata={"a": 1}),
    chat(metadata={str(number): "" for number in range(17)}),
    chat(service_tier="x" * 33),
    chat(reasoning_effort="huge"),
    chat(chat_template_kwargs={"messages": []}),
    chat(chat_template_kwargs={"bos_token": "x"}),
    chat(chat_template_kwargs={"a": "x" * 20_000}),
    chat(chat_template_kwargs={str(number): 1 for number in range(33)}),
    chat(chat_template_kwargs=[]),
    chat(continue_final_message=True),
    chat(continue_final_message=True, add_generation_prompt=True),
    chat(thinking_token_budget=0),
    chat(thinking_token_budget=3, guided_regex="a"),
    chat(messages=[{"role": "user", "content": "x", "reasoning_content": "y"}]),
    chat(modalities=["audio"]),
    chat(prediction={"type": "content"}),
    chat(prediction={"type": "content", "content": "x " * 40_000}),
    completions(prediction="x"),
    chat(speculate="ngram"),
    chat(web_search_options={}),
    chat(echo=True),
    chat(best_of=2),
    chat(top_logprobs=-1),
    _with_messages({"content": "x"}),
    _with_messages({"role": "assistant"}),
    _with_messages({"role": "user", "content": "x", "colour": "red"}),
    _with_messages({"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}),
    _with_messages(_calling(arguments="{}") | {"role": "user", "content": "x"}),
    _with_messages({"role": "user", "content": "x"}, {"role": "tool", "content": "4"}),
    _with_messages(_calling(arguments="[1]")),
    _with_messages(_calling(arguments="{")),
    Sent(
        "/v1/chat/completions",
        {
            "messages": [_calling(arguments='{"a":' * 600 + "1" + "}" * 600)],
        },
        note="`arguments` of a call with 600 levels",
    ),
    Sent(
        "/v1/chat/completions",
        {
            "messages": [_calling(arguments='{"a":[' + "[]," * 65_535 + "[]]}")],
        },
        note="`arguments` of a call with 65,536 empty lists",
    ),
    _with_messages({"role": "user", "content": [{"type": "text"}]}),
    _with_messages({"role": "assistant", "content": "x", "function_call": {"name": "f"}}),
]
BOUND_OUTPUT = [
    chat(tools=[_tool("a b")]),
    chat(tools=[_tool(), _tool()]),
    chat(tools=[{"type": "retrieval"}]),
    chat(tools=[_tool()], tool_choice="maybe"),
    chat(tools=[_tool()], tool_choice=_tool("g")),
    chat(tools=[_tool()], tool_choice=_allowed("required", "g")),
    chat(tools=[_tool()], tool_choice=_allowed("maybe", "f")),
    chat(tools=[_tool()], tool_choice={"type": "allowed_tools"}),
    chat(tools=[_tool()], tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
    chat(tools=[_tool()], tool_choice={"type": "custom"}),
    chat(tools=[_tool()], tool_choice={"type": "function", "function": {}}),
    chat(tools=[_tool()], tool_choice=3),
    chat(tools=[_tool()], tool_choice="required", ignore_eos=True),
    chat(tools=[_tool(parameters={"type": "array"})], tool_choice="required"),
    chat(tools=[_tool(parameters={"type": "object", "properties": {"a": {"type": "foo"}}})], tool_choice="required"),
    chat(tools=[_tool()], guided_regex="a"),
    chat(tools=[_tool()] * 129),
    chat(response_format={"type": "json_schema"}),
    chat(response_format={"type": "json_schema", "json_schema": {"name": "a b"}}),
    chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "foo"}}}),
    chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "s", "strict": True, "schema": {"type": "array", "uniqueItems": True}},
        }
    ),
    completions(response_format="json"),
    completions(guided_json="{"),
    completions(guided_json=3),
    Sent(
        "/v1/completions", {"prompt": "x", "guided_json": "[" * 260 + "]" * 260}, note="`guided_json` with 260 levels"
    ),
    completions(guided_regex=""),
    completions(guided_regex="a" * 16385),
    completions(guided_regex="(?=a)b"),
    completions(guided_choice=["a", ""]),
    completions(guided_choice="a"),
    completions(guided_grammar="start: %%"),
    completions(structured_outputs={"regex": "a", "choice": ["a"]}),
    completions(structured_outputs={"xml": "a"}),
    completions(guided_regex="a", min_tokens=2),
]
RESPONSES = [
    Sent("/v1/responses", {}),
    responses(input=[]),
    responses(input=3),
    responses(input=["x"]),
    responses(input=[{"role": "king", "content": "x"}]),
    responses(input=[{"role": "user", "content": 3}]),
    responses(input=[{"role": "user", "content": [{"type": "input_image"}]}]),
    responses(input=[{"type": "file_search_call"}]),
    responses(input=[{"type": "reasoning", "encrypted_content": "x"}]),
    responses(reasoning={"effort": "huge"}),
    responses(reasoning={"summary": "detailed"}),
    responses(input=[{"type": "function_call_output", "output": "4"}]),
    responses(input=[{"role": "user", "content": "x", "colour": "red"}]),
    responses(max_output_tokens=0),
    responses(max_tokens=5),
    responses(previous_response_id="resp_1"),
    responses(conversation="conv_1"),
    responses(truncation="middle"),
    responses(tools=[{"type": "web_search"}]),
    responses(text={"format": {"type": "xml"}}),
    responses(text={"verbosity": "low"}),
    responses(tools=[{"type": "function", "name": "f"}], tool_choice={"type": "allowed_tools", "mode": "auto"}),
    responses(background=True, stream=True),
    responses(prompt={"id": "pmpt_1"}),
    responses(include=["reasoning.encrypted_content"]),
    responses(temperature=3),
    responses(max_output_tokens=1 << 20),
    responses(input="x" * 5000),
    responses(input=[{"type": "item_reference", "id": "msg_1"}]),
    Sent("/v1/responses/input_tokens", {"input": "x", "previous_response_id": "resp_0"}),
    Sent("/v1/responses/input_tokens", {"input": "x " * 600}),
    Sent("/v1/responses/resp_none", method="GET"),
    Sent("/v1/responses/resp_none/cancel"),
]
_TOOL = {"name": "f", "input_schema": {"type": "object"}}
_THINKS = {"type": "enabled", "budget_tokens": 1024}
_FORM = {"type": "json_schema", "schema": {}}
MESSAGES = [
    Sent("/v1/messages", {"messages": CHAT}),
    messages(max_tokens=0),
    messages(max_tokens=600),
    messages(messages=[]),
    messages(messages=[{"role": "king", "content": "x"}]),
    messages(messages=[{"role": "user", "content": "x " * 600}]),
    messages(system=[{"type": "image"}]),
    messages(temperature=1.1),
    messages(top_k=-1),
    messages(stop_sequences=["a"] * 17),
    messages(stop_sequences=[""]),
    messages(max_token=3),
    messages(thinking={"type": "enabled"}),
    messages(thinking=_THINKS | {"budget_tokens": 1023}),
    messages(thinking=_THINKS),
    messages(output_format=_FORM, output_config={"format": _FORM}),
    messages(thinking={"type": "adaptive"}, tools=[_TOOL], tool_choice={"type": "any"}),
    messages(output_config={"effort": "huge"}),
    messages(output_config={"format": {"type": "json_schema", "schema": {"type": "foo"}}}),
    messages(tools=[{"name": "a b", "input_schema": {}}]),
    messages(tools=[{"type": "web_search_20250305", "name": "web_search"}]),
    messages(tools=[_TOOL], tool_choice={"type": "tool"}),
    messages(tools=[_TOOL], tool_choice={"type": "tool", "name": "g"}),
    messages(tool_choice={"type": "any"}),
    messages(mcp_servers=[{}]),
    messages(container="c"),
    messages(thread={"type": "create"}),
    messages(priority="urgent"),
    messages(model="gpt-4"),
    blocks("user", {"type": "image", "source": {}}),
    blocks("user", {"type": "thinking", "thinking": "x"}),
    blocks("assistant", {"type": "redacted_thinking", "data": "x"}),
    blocks("assistant", {"type": "tool_use", "id": "t", "name": "f", "input": {}}),
    blocks("user", {"type": "tool_result", "content": "4"}),
    blocks("user", {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document"}]}),
    messages(path="/count_tokens", messages=[]),
    messages(path="/count_tokens", max_tokens=9),
    Sent("/v1/messages", b"{", note="the body `{`"),
    Sent("/v1/messages", {}, key="", note="no key"),
    Sent("/v1/messages", method="GET"),
    Sent("/v1/messages/batches", {}),
]
_FILE, _PURPOSE = ('name="file"; filename="a"', "{}"), ('name="purpose"', "batch")
FILES = [
    upload("no `file`", _PURPOSE),
    upload("no `purpose`", _FILE),
    upload("the purpose `fine-tune`", _FILE, ('name="purpose"', "fine-tune")),
    upload("two files", _FILE, _FILE, _PURPOSE),
    upload("a field `colour`", _FILE, _PURPOSE, ('name="colour"', "red")),
    upload(
        "`expires_after` of 60 s", _FILE, _PURPOSE, ('name="expires_after[anchor]"', "created_at"),
        ('name="expires_after[seconds]"', "60"),
    ),
    upload("`expires_after` without its anchor", _FILE, _PURPOSE, ('name="expires_after[seconds]"', "3600")),
    upload("a purpose of 2,000 bytes", _FILE, ('name="purpose"', "x" * 2000)),
    Sent("/v1/files", {}, note="a body of JSON"),
    Sent("/v1/files", b"x", headers={"Content-Type": "multipart/form-data; boundary=x"}, note="no part"),
    Sent("/v1/files?limit=0", method="GET"),
    Sent("/v1/files?order=up", method="GET"),
    Sent("/v1/files/file-none", method="GET"),
    Sent("/v1/files/file-none", method="DELETE"),
    Sent("/v1/files/file-none/content", method="GET"),
    batches(),
    batches(input_file_id="file-none"),
    batches(input_file_id="../batch.json"),
    batches(input_file_id="file-none", more=1),
    batches(input_file_id="file-none", endpoint="/v1/messages"),
    batches(input_file_id="file-none", completion_window="90m"),
    batches(input_file_id="file-none", completion_window="721h"),
    batches(input_file_id="file-none", output_expires_after={"anchor": "created_at", "seconds": 60}),
    batches(input_file_id="file-none", metadata={"a": 1}),
    batches(input_file_id="file-none", metadata={"k" * 65: "v"}),
    Sent("/v1/batches?limit=101", method="GET"),
    Sent("/v1/batches?after=x", method="GET"),
    Sent("/v1/batches/batch_none", method="GET"),
    Sent("/v1/batches/batch_none/cancel"),
]  # fmt: skip
TOKENS = [
    Sent("/tokenize", {}),
    Sent("/tokenize", {"prompt": "x", "messages": CHAT}),
    Sent("/tokenize", {"prompt": 3}),
    Sent("/tokenize", {"model": "gpt-4", "prompt": "x"}),
    Sent("/tokenize", {"messages": CHAT, "add_special_tokens": True}),
    Sent("/detokenize", {}),
    Sent("/detokenize", {"tokens": [-1]}),
    Sent("/detokenize", {"tokens": [1_000_000]}),
    Sent("/detokenize", {"tokens": "1"}),
]
WIDE: dict[str, Any] = {f"a{number}": 1 for number in range(5000)}
BODIES = [
    Sent("/v1/completions", b"{", note="the body `{`"),
    Sent("/v1/completions", b"", note="no body"),
    Sent("/v1/completions", b"[]", note="the body `[]`"),
    Sent("/v1/completions", b"3", note="the body `3`"),
    Sent("/v1/completions", b'{"prompt": "\xff"}', note="a byte that is no UTF-8"),
    Sent("/v1/completions", b'{"prompt": "\\ud800"}', note="half of a surrogate pair"),
    Sent("/v1/completions", b'{"prompt": NaN}', note='`{"prompt": NaN}`'),
    Sent("/v1/completions", b"[" * 50_000, note="50,000 times `[`"),
    Sent("/v1/completions", b'{"a":' * 40 + b"1" + b"}" * 40, note="objects in objects, 40 levels"),
    completions(**WIDE),
    completions(logit_bias=WIDE),
    Sent("/v1/completions", b'{"prompt": [' + b"[]," * 65_535 + b"[]]}", note="`prompt` with 65,536 empty lists"),
    Sent("/v1/completions", b'{"prompt": "' + b"x" * MAX_BODY + b'"}', note=f"a body above {MAX_BODY} bytes"),
    Sent("/v1/completions", b"prompt=x", headers={"Content-Type": "text/plain"}, note="`Content-Type: text/plain`"),
    Sent("/v1/completions", {"prompt": "x"}, headers={"x-filler": "y" * 40_000}, note="a header of 40,000 bytes"),
    Sent("/v1/completions", {"prompt": "x"}, headers={f"x-{n}": "y" for n in range(101)}, note="more than 100 headers"),
    Sent(
        "/", raw=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", note="a greeting of TLS on a port without it"
    ),
    Sent("/", raw=b"hello\r\n\r\n", note="`hello`, which is no HTTP"),
    Sent("/", raw=b"GET /" + b"x" * 70_000, note="a path of 70,000 bytes without an end"),
    Sent(
        "/v1/completions",
        raw=b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
        + f"Authorization: Bearer {USER}\r\n\r\n{{".encode(),
        note="a body of which the rest does not come",
    ),
    Sent("/v1/completions", method="GET"),
    Sent("/v1/models", {}, method="POST"),
    Sent("/v1/models/gpt-4", method="GET"),
    Sent("/v1/embeddings", {"input": "x"}),
    Sent("/v1/rerank", {"query": "x", "documents": ["y"]}),
    Sent("/v1/score", {"text_1": "x", "text_2": "y"}),
    Sent("/", method="GET"),
    Sent("/v1/requests/x", method="PUT"),
    Sent("/stats", headers={"Origin": "http://evil.example"}, ops=True, note="ops port, `Origin: http://evil.example`"),
    Sent("/stats", method="GET", headers={"Host": "evil.example"}, ops=True, note="ops port, `Host: evil.example`"),
]
_ONCE = Sent("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"Idempotency-Key": "mine"})
_STREAM = Sent("/v1/completions", {"prompt": "x", "max_tokens": 1, "stream": True}, headers={"Idempotency-Key": "s"})
KEYS_AND_IDS = [
    Sent("/v1/completions", {"prompt": "x"}, key="", note="no key"),
    Sent("/v1/completions", {"prompt": "x"}, key="", headers={"Authorization": "Bearer wrong"}, note="another key"),
    Sent("/v1/models", method="GET", key="", headers={"Authorization": "Basic dTpw"}, note="`Authorization: Basic`"),
    Sent("/v1/completions", {"prompt": "x", "priority": "high"}, key="low", note="a key for `low` at most"),
    Sent(
        "/v1/completions", {"prompt": "x"}, key="slow",
        before=(Sent("/v1/completions", {"prompt": "x", "max_tokens": 1}, key="slow"),),
        note="the second of a key that may send one a minute",
    ),
    Sent("/v1/completions", {"prompt": "x"}, headers={"Idempotency-Key": ""}, note="an empty `Idempotency-Key`"),
    Sent("/v1/completions", {"prompt": "x"}, headers={"Idempotency-Key": "k" * 256}, note="`Idempotency-Key` too long"),
    Sent(
        "/v1/completions", {"prompt": "y"}, headers={"Idempotency-Key": "mine"}, before=(_ONCE,),
        note="`Idempotency-Key` of another body",
    ),
    Sent(
        "/v1/completions", {"prompt": "x", "stream": True},
        headers={"Idempotency-Key": "new", "Last-Event-ID": "cmpl-1:3"},
        note="`Last-Event-ID` of a request that is not known",
    ),
    Sent(
        "/v1/completions", _STREAM.body, headers={**_STREAM.headers, "Last-Event-ID": "cmpl-1:3"}, before=(_STREAM,),
        note="`Last-Event-ID` of another request",
    ),
    Sent("/v1/requests/cmpl-none", method="GET"),
    Sent("/v1/requests/cmpl-none", method="DELETE"),
    Sent("/v1/requests/cmpl-none/stream", method="GET"),
]  # fmt: skip
WITHOUT_SCHEDULER = [
    Sent("/v1/completions", {"prompt": "x"}, note="no scheduler is there"),
    Sent("/health/ready", method="GET", note="the same"),
]
CROWDED = [
    completions("1,000,000 prompt tokens wait already"),
    completions("requests hold 10,000,000 bytes in Redis already"),
    completions("the first token is predicted in 5,000 ms", ttft_slo_ms=1000),
    completions("the first token is predicted in 5,000 ms", deadline_ms=1500),
]
"""What a server of which much is asked refuses; see `answers` of tests/support/docs/bad_input.py."""
SECTIONS: dict[str, list[Sent]] = {
    "Fields of completions and chat": FIELDS,
    "More fields of chat": CHAT_FIELDS,
    "Tools and structured output": BOUND_OUTPUT,
    "Responses": RESPONSES,
    "Messages": MESSAGES,
    "Files and batches": FILES,
    "Tokens": TOKENS,
    "Bodies, headers, methods and paths": BODIES,
    "Keys, limits and requests by id": KEYS_AND_IDS,
}
