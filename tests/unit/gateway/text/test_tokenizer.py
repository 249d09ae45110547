"""The model directory, raw prompts and chat templates; transformers is the oracle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from protos import queue_pb2
from services.gateway.delivery.stream import ChoiceText
from services.gateway.errors import ApiError
from services.gateway.openai.bodies import CompletionBody
from services.gateway.openai.completions import completion_spec
from services.gateway.request import (
    CHANNELS,
    FRAMED,
    THINKING,
    UNDECIDED,
    VERSION,
    GenerationSpec,
    Limits,
    SamplingDefaults,
    ToolUse,
)
from services.gateway.text.reasoning import MARKERS
from services.gateway.text.tokenizer import ModelText
from shared.errors import ModelError
from shared.settings import DEMO_MODEL
from shared.text.grammars import Grammars, NoGrammarsError
from shared.text.tokenizer import FAR_END, TokenizerError
from shared.wire.columns import pack
from tests.support.checkpoints.tokenizers import CHAT_TEMPLATE, CONTEXT, byte_fallback, byte_level, write_model
from tests.support.gateway.generations import model, spec, stored
from tests.support.waiting import until
from tests.unit.gateway.text.test_reasoning import CALLS, HEAD, NEXT

CONVERSATION = [
    {"role": "system", "content": "You are brief. "},
    {"role": "user", "content": "  Grüße! What is 1 + 1? 🐋\n"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And the fox?"},
]
# Shapes seen in models on the Hub: loops, conditions, namespaces, slices, tojson, default arguments, generation blocks.
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{% if loop.index0 == 0 and system != false %}"
        "{% set content = '<<SYS>>' + system + '<</SYS>>' + m['content'] %}"
        "{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}{{ ' ' + content.strip() + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{%- set ns = namespace(found=false) -%}\n{%- for m in messages %}\n  {%- if m.role == 'user' %}"
        "{%- set ns.found = true %}{%- endif %}\n"
        "  {{- '<|im_start|>' ~ m.role ~ '\\n' ~ (m | tojson) ~ '<|im_end|>' }}\n"
        "{%- endfor %}\n{%- if ns.found and add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% if loop.index > 8 %}{% break %}{% endif %}{% endfor %}"
    ),
}


def theirs(directory: Path) -> Any:
    from transformers import AutoTokenizer  # most processes of a run need no transformers

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompting", [True, False])
def test_chat_has_the_tokens_of_transformers(tmp_path: Path, name: str, prompting: bool) -> None:
    model = write_model(tmp_path / "m", chat_template=TEMPLATES[name])
    expected = theirs(model).apply_chat_template(
        CONVERSATION, add_generation_prompt=prompting, tokenize=True, return_dict=False
    )
    assert ModelText(model).chat.encode(CONVERSATION, prompting) == list(expected)


@pytest.mark.parametrize("form", ["list", "file"])
def test_chat_template_may_be_a_list_or_a_file(tmp_path: Path, form: str) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]
    model = write_model(tmp_path / "m", chat_template=named if form == "list" else "not this")
    if form == "file":
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    plain = ModelText(write_model(tmp_path / "plain"))
    assert ModelText(model).chat.encode(CONVERSATION) == plain.chat.encode(CONVERSATION)


STATED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
OUT_OF_RANGE = {"temperature": 9, "top_p": "high", "top_k": -1, "min_p": None, "repetition_penalty": True}


@pytest.mark.parametrize(
    ("generation_config", "flags", "defaults", "eos_ids"),
    [
        ({}, {}, SamplingDefaults(), [1]),
        ({**STATED, "do_sample": True, "eos_token_id": [1, 3]}, {}, SamplingDefaults(**STATED), [1, 3]),
        (STATED, {"sampling_defaults": "openai"}, SamplingDefaults(), [1]),
        (OUT_OF_RANGE, {}, SamplingDefaults(), [1]),
    ],
    ids=["none", "stated", "stated and not wanted", "out of range"],
)
def test_defaults_and_end_ids_come_from_generation_config(
    tmp_path: Path, generation_config: dict[str, Any], flags: Any, defaults: SamplingDefaults, eos_ids: list[int]
) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "model.safetensors").unlink()  # the gateway needs no weights
    (directory / "generation_config.json").write_text(json.dumps(generation_config))
    model = ModelText(directory, **flags)
    assert (model.defaults, model.eos_ids, model.max_model_len) == (defaults, eos_ids, CONTEXT)


async def test_sampling_of_the_model_fills_fields_a_request_lacks(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 20, "top_p": 0.75}))
    model = ModelText(directory)
    for fields, wanted in (({}, (0.5, 20, 0.75, 1)), ({"temperature": 0, "top_k": 0, "top_p": 1}, (0, 0, 1, 1))):
        body = CompletionBody(model="m", prompt="a", **fields)
        made = (await completion_spec(body, model, Limits(max_model_len=CONTEXT))).sampling
        assert (made.temperature, made.top_k, made.top_p, made.repetition_penalty) == wanted


@pytest.mark.parametrize(
    ("template", "words"), [(TEMPLATES["llama-2"], "roles must alternate"), ("{{ 1 / 0 }}", "division by zero")]
)
def test_template_that_fails_answers_400(tmp_path: Path, template: str, words: str) -> None:
    model = ModelText(write_model(tmp_path / "m", chat_template=template))
    with pytest.raises(ApiError, match=words) as refusal:
        model.chat.encode([{"role": "assistant", "content": "x"}])
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_raw_prompt_has_the_tokens_of_transformers(tmp_path: Path, kind: Any, flags: dict[str, Any]) -> None:
    names = {} if kind is byte_level else {"bos_token": "<s>", "eos_token": "</s>"}
    model = write_model(tmp_path / "m", kind(), **names, **flags)
    for text in ("The quick fox", "Grüße 🐋\n", "a</s>b<|eos|>c", " "):
        assert ModelText(model).encode(text) == theirs(model).encode(text)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "cannot be read"),
        (lambda d: (d / "config.json").write_text("[1]"), "no JSON object"),
        (lambda d: (d / "config.json").write_text("{"), "not readable as JSON"),
        (lambda d: (d / "config.json").write_text("{}"), "max_position_embeddings"),
        (lambda d: (d / "chat_template.jinja").write_text("{% if %}"), "does not compile"),
        (lambda d: (d / "chat_template.jinja").write_text("{{" + "[" * 900 + "]" * 900 + "}}"), "does not compile"),
        (lambda d: (d / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(9)]})), "at most 8"),
    ],
)
def test_invalid_model_directory_is_refused_by_its_fault(tmp_path: Path, break_it: Any, said: str) -> None:
    model = write_model(tmp_path / "m")
    break_it(model)
    with pytest.raises(ModelError, match=said):
        ModelText(model)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n_positions": 77}, 77),
        ({"model_type": "bloom", "seq_length": 99}, 99),
        ({"model_type": "bloom"}, 2048),
        ({"text_config": {"model_type": "gemma3_text"}}, 131072),
    ],
)
def test_context_length_is_found_under_each_familys_name(tmp_path: Path, fields: dict[str, Any], expected: int) -> None:
    model = write_model(tmp_path / "m")
    (model / "config.json").write_text(json.dumps(fields))
    assert ModelText(model).max_model_len == expected


@pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="the demo model is not in this checkout")
def test_demo_model_has_the_tokens_of_transformers() -> None:
    model, oracle = ModelText(DEMO_MODEL), theirs(DEMO_MODEL)
    assert model.text.has_table
    for text in ("def main():\n    pass\n", "Grüße 🐋 逆戟鲸"):
        assert model.encode(text) == oracle.encode(text)
    expected = oracle.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert model.chat.encode(CONVERSATION) == list(expected)


def test_vocabulary_size_of_the_config_is_bounded(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": 10**12}))
    with pytest.raises(ModelError, match="vocab_size is 1000000000000, expected a positive integer up to 4194304"):
        ModelText(directory)


def test_grammars_are_refused_where_the_tokenizer_is_unbounded(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    source = json.loads((directory / "tokenizer.json").read_text())
    source["normalizer"] = {"type": "Prepend", "prepend": "x" * 5000}
    (directory / "tokenizer.json").write_text(json.dumps(source))
    with pytest.raises(NoGrammarsError, match=r"its tokenizer\.json: normalizer: one byte of text can become 10002"):
        Grammars(directory, CONTEXT).prepare()


def test_unknown_expression_starts_encoders_with_the_model(tmp_path: Path) -> None:
    def encoders() -> set[int]:
        pids = set()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a process of another test has ended meanwhile
                if FAR_END in child.cmdline():
                    pids.add(child.pid)
        return pids

    path = write_model(tmp_path / "m") / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "[a-z]+x?"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": split}))
    before = encoders()
    text = ModelText(path.parent)
    until("one of the tokenizer, one of its twin", lambda: len(encoders() - before) == 2)
    assert text.try_template() == ""
    text.close()
    with pytest.raises(ApiError, match=r"messages cannot be tokenized now: .* closed with its model; retry") as raised:
        text.chat.encode([{"role": "user", "content": "Hello"}])
    assert (raised.value.status, raised.value.code) == (503, "tokenizer_unavailable")
    assert not encoders() - before


def test_text_of_ids_is_bounded(tmp_path: Path) -> None:
    model = ModelText(write_model(tmp_path / "m"))
    with pytest.raises(TokenizerError, match="at most 1073741824 are made"):
        model.text.decode([0] * ((1 << 30) // (4 * model.longest) + 1))


STATES = (UNDECIDED, THINKING, FRAMED)
RECORDS: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"reasoning": state, "markers": list(marks)},
            f" {marks[0]}a{marks[1]} {''.join(marks[2:3])} b{marks[1]} {''.join(marks[3:])}",
        )
        for marks in MARKERS.values()
        for state in STATES
    ),
    ({"reasoning": CHANNELS}, f"{HEAD}a{NEXT}<|channel|>final<|message|>b<|return|>"),
    (
        {"reasoning": CHANNELS, "tools": ToolUse("channels", ("f",), True)},
        f"{HEAD}a{NEXT} to=functions.f<|channel|>commentary<|message|>{{}}",
    ),
    *(({"tools": ToolUse(kind, ("f",), True)}, f"{call}\n") for kind, call in sorted(CALLS.items())),
    *(({"tools": ToolUse(kind, ("f",), False, True)}, call[:-2]) for kind, call in sorted(CALLS.items())),
    ({"stop": ["b"], "min_tokens": 3, "include_stop_str_in_output": True}, "bab b"),
]
TOLD = {1: "0bfe778422562b0440bdb5f781d9ba8cd5ff1619e5dfabf213bdf4edca7b6a57"}
"""By version: the digest of what RECORDS tell. An entry stays as it is once a build has that version."""


def told(fields: dict[str, Any], text: str) -> list[Any]:
    choice, found = ChoiceText(stored(spec(endpoint="chat", stop_ids=[], **fields)), model(), [50]), []
    tokens = model().encode(text)
    for at, token in enumerate(tokens, 1):
        if choice.finish_reason is None:
            content, _, _ = choice.feed([token], "stop" if at == len(tokens) else None)
            found += [choice.reasoning, content, [(call.name, call.arguments) for call in choice.calls]]
    return [*found, choice.finish_reason, choice.reasoning_tokens]


def test_record_tells_the_same_while_its_version_is_the_same() -> None:
    digest = hashlib.sha256(repr([told(*record) for record in RECORDS]).encode()).hexdigest()
    if TOLD.get(VERSION) != digest:
        pytest.fail(f"records of version {VERSION} tell something else: raise VERSION in request.py; TOLD: {digest}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_tails": [pack([50, -1])]}, "token -1 is outside the vocabulary"),
        ({"prompt_tails": [pack([50, 1 << 20])]}, "token 1048576 is outside the vocabulary"),
        ({"logprobs": 1000}, "logprobs: 999 tokens"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs: 999 tokens"),
    ],
)
def test_record_that_no_gateway_wrote_is_refused(changes: dict[str, Any], said: str) -> None:
    written = queue_pb2.Delivery.FromString(spec(endpoint="chat").to_delivery(lambda prompt, _: list(prompt)))
    for name in changes:
        written.ClearField(name)
    written.MergeFrom(queue_pb2.Delivery(**changes))
    with pytest.raises(ValueError, match=said):
        GenerationSpec.from_record("cmpl-1", model().vocab_size, {b"delivery": written.SerializeToString()})
