"""However tokens are cut into deliveries, a client reads the same: text, calls, reasons, usage. Oracles: the bytes of
all tokens at once, stop strings by brute force, a reader of events of its own."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.delivery.stream import Row
from services.gateway.openai.answers import EventWriter, answer_body
from services.gateway.request import GenerationSpec
from services.gateway.text.tokenizer import ModelText
from tests.support import sse
from tests.support.gateway.generations import generation, model
from tests.support.gateway.generations import spec as make_spec
from tests.unit.gateway.text.test_generation import brute_force

FINISHES = {1: "stop", 2: "length", 4: "deadline"}
PIECES = [
    "a", "\n", "\r", "\r\n", "\0", "\u2028", "\ufeff", "data: ", ": ", '"', "\\", "é", "逆", "🐋", "👩‍🚀", "e\u0301",
    " ",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=8).map("".join)
STOPS = st.lists(
    st.sampled_from([piece for piece in PIECES if piece.strip()]) | st.text(min_size=1, max_size=3), max_size=3
)


def bytes_of(tokens: list[int], text: ModelText, skip_special: bool) -> bytes:
    return b"".join(text.text.piece(token) for token in tokens if not (skip_special and token in text.text.special))


def readable(data: bytes, is_whole: bool) -> str:
    """What of bytes can be told: half a character may still become one."""
    if is_whole:
        return data.decode("utf-8", "replace")
    for size in range(min(3, len(data)) + 1):
        cut = data[: len(data) - size]
        try:
            data[len(data) - size :].decode()
        except UnicodeDecodeError as error:
            if size and error.reason == "unexpected end of data" and error.start == 0:
                return cut.decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def expected(tokens: list[int], finish: int, request: GenerationSpec, text: ModelText) -> tuple[str, str, int]:
    """Text, reason and counted tokens of a choice, from the bytes of all that was said so far."""

    def stopped(count: int, is_whole: bool) -> tuple[str, str | None]:
        said = readable(bytes_of(tokens[:count], text, request.skip_special_tokens), is_whole)
        return brute_force(said, request.stop, request.include_stop_str_in_output)

    for count in range(1, len(tokens) + 1):
        shown, stop = stopped(count, False)
        if stop is not None:
            return shown, "stop", count
    shown, stop = stopped(len(tokens), True)
    return shown, "stop" if stop is not None else FINISHES[finish], len(tokens)


async def streamed(request: GenerationSpec, text: ModelText, deliveries: list[list[tuple[Row, int]]]) -> bytes:
    running, stream, _ = generation(request, text)
    writer = EventWriter(running, "fp")
    told = writer.echo()
    for rows in deliveries:
        if running.is_done:
            break
        for row, first in rows:
            stream.offer(row, first)
        told += writer.events(await running.next(0.0))  # at once: all of a delivery may have been there before
    assert running.is_done
    return told + writer.end(running.usage)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, GenerationSpec, list[list[int]], list[int]]:
    """Tokenizer, request, tokens and finish of each choice. The tokens are those of texts, or any at all."""
    kind = draw(st.sampled_from(["byte_fallback", "byte_level"]))
    text, count = model(kind), draw(st.integers(1, 3))
    any_tokens = st.lists(st.integers(2, text.vocab_size - 1), max_size=16)
    made = st.one_of(TEXTS.map(lambda said: text.encode(said, add_special_tokens=False)), any_tokens)
    prompt = text.encode("x")
    request = make_spec(
        endpoint=draw(st.sampled_from(["chat", "completions"])), n=count, stop=draw(STOPS), prompts=[prompt],
        stop_ids=[], include_usage=draw(st.booleans()), return_token_ids=draw(st.booleans()),
        include_stop_str_in_output=draw(st.booleans()), skip_special_tokens=draw(st.booleans()),
        echo=draw(st.booleans()), prompt_texts=[draw(TEXTS)],
    )  # fmt: skip
    tokens = [draw(made) for _ in range(count)]
    said = text.text.decode(tokens[0], skip_special=False)
    if said and draw(st.booleans()):  # a stop string that does occur, whole or in part
        at = draw(st.integers(0, len(said) - 1))
        request.stop.append(said[at : at + draw(st.integers(1, 5))] + draw(st.sampled_from(["", "", "!"])))
    return kind, request, tokens, [draw(st.sampled_from(sorted(FINISHES))) for _ in range(count)]


def deliveries_of(draw: st.DrawFn, tokens: list[list[int]], finishes: list[int]) -> list[list[tuple[Row, int]]]:
    """Rows of each choice in order, those of several choices in any; some of their tokens come twice."""
    steps = st.tuples(st.integers(0, len(tokens) - 1), st.integers(1, 9), st.integers(0, 2), st.booleans())
    made: list[list[tuple[Row, int]]] = []
    at = [0] * len(tokens)
    for choice, size, back, is_apart in draw(st.lists(steps, max_size=12)):
        first, end = max(0, at[choice] - back), min(len(tokens[choice]), at[choice] + size)
        if end == at[choice]:
            continue
        row = (Row(choice, tokens[choice][first:end]), first)
        at[choice] = end
        if is_apart or not made:
            made.append([row])
        else:
            made[-1].append(row)
    last = [(Row(choice, own[at[choice] :], finishes[choice]), at[choice]) for choice, own in enumerate(tokens)]
    return [*made, *([row] for row in draw(st.permutations(last)))]


@given(st.data())
@settings(max_examples=60)
def test_events_text_and_usage_are_the_same_however_delivered(data: st.DataObject) -> None:
    kind, request, tokens, finishes = data.draw(conversations())
    made = model(kind)
    deliveries = deliveries_of(data.draw, tokens, finishes)
    wanted = [expected(own, finish, request, made) for own, finish in zip(tokens, finishes, strict=True)]
    stream = asyncio.run(streamed(request, made, deliveries))
    events = sse.parse(stream)
    assert events[-1].data == "[DONE]" and [event.kind for event in events] == ["message"] * len(events)
    chunks = [json.loads(event.data) for event in events[:-1]]
    usage = {
        "prompt_tokens": len(request.prompts[0]),
        "completion_tokens": sum(count for *_, count in wanted),
        "total_tokens": len(request.prompts[0]) + sum(count for *_, count in wanted),
    }
    if request.include_usage:
        assert chunks.pop()["usage"] == usage
    said, reasons, ids = [""] * request.n, [None] * request.n, [[] for _ in range(request.n)]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert reasons[choice["index"]] is None, "nothing comes behind an end"
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        assert text or choice["finish_reason"] or request.return_token_ids or "role" in choice.get("delta", {})
        said[choice["index"]] += text
        ids[choice["index"]] += choice.get("token_ids", [])
        reasons[choice["index"]] = choice["finish_reason"]
    before = request.prompt_texts[0] if request.echo else ""
    assert said == [before + shown for shown, _, _ in wanted]
    assert reasons == [reason for _, reason, _ in wanted]
    if request.return_token_ids:
        assert ids == [own[:count] for own, (_, _, count) in zip(tokens, wanted, strict=True)]
    running, rows, _ = generation(request, made)
    for row, first in (one for delivery in deliveries for one in delivery):
        rows.offer(row, first)
    answer = asyncio.run(answer_body(running, "fp"))
    assert answer["usage"] == usage
    echoed = "" if request.endpoint == "chat" else before
    told = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
    assert told == [echoed + shown for shown, _, _ in wanted]
