"""Tokens a step behind grammars, with forced drafts and without.

    python -m bench.studies.forced [--answers N] [--streams 1,8] [--name NAME]

Steps and tokens are counted, so the machine may be busy, if 1 ms of its time is still enough to look ahead. The shipped
core plans the steps, and the shipped process of masks says what is forced; recorded answers stand for the model, and
the steps take virtual time. Each answer is its tenant's first one, so that no earlier answer of the schema is known, or
all are of one tenant. Writes bench/results/forced.json.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.result import RESULTS, ROOT, provenance, write
from bench.studies.speculation import texts
from protos import queue_pb2
from services.gateway.text.grammar import json_grammar
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Int32, Limits, NewRequest, StepPlan, StepResult
from services.simulator.engine import MAX_DRAFTS
from shared.command_line.arguments import Parser
from shared.text.grammar_process import GrammarProcess

SEED = 20261127
MODEL = ROOT / "assets" / "demo-model"
STEP_NS, TOKEN_NS, BESIDE_NS = 8_000_000, 250_000, 600_000
CONTEXT, BLOCK_SIZE = 1024, 16
_keys = itertools.count(1)  # of the sequences at the process
TEXT = {"type": ["string", "null"]}
FORM: dict[str, Any] = {
    "customer_sentiment": {"enum": ["positive", "neutral", "negative", "mixed"]},
    "issue_category": {"enum": ["billing", "shipping_delay", "product_defect", "account_access", "cancellation"]},
    "requires_human_escalation": {"type": "boolean"},
    "order_identifier": TEXT,
    "estimated_resolution_days": {"type": "integer"},
    "suggested_response_template": {"enum": ["apology_and_refund", "status_update", "request_more_information"]},
    "confidence_score": {"type": "number"},
    "email_address": TEXT,
}
"""Of an answer that sorts a letter: long names and values."""


@dataclass(slots=True)
class Answer:
    """A recorded answer. drawn: its tokens so far."""

    prompt: list[int]
    tokens: Int32
    grammar: str
    drawn: int = 0


@dataclass(slots=True)
class Count:
    """The figures of a run."""

    rows: int = 0
    tokens: int = 0
    drafted: int = 0
    right: int = 0
    forced: list[tuple[int, list[int]]] = field(default_factory=list)  # of the step that is answered, by slot


def forms(answers: int) -> Iterator[tuple[str, str]]:
    """Yield letters with the answers that sort them, drawn at random."""
    draw = random.Random(SEED)
    for number in range(answers):
        found = {name: draw.choice(about["enum"]) for name, about in FORM.items() if "enum" in about}
        found |= {"requires_human_escalation": draw.random() < 0.5, "confidence_score": round(draw.random(), 2)}
        found |= {"order_identifier": draw.choice([None, f"A-{draw.randrange(10**6)}"])}
        found |= {"estimated_resolution_days": draw.randrange(30)}
        found |= {"email_address": draw.choice([None, f"user{draw.randrange(999)}@example.com"])}
        yield f"Letter {number} asks what happens now.\n", json.dumps({name: found[name] for name in FORM})


def recorded(kind: str, answers: int) -> list[Answer]:
    """Return answers of a kind: `records` of bench.studies.speculation, or `forms`."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    if kind == "records":
        pairs, schema = list(texts.records()), texts.SCHEMA
        random.Random(SEED).shuffle(pairs)
    else:
        pairs = list(forms(answers))
        schema = {"type": "object", "properties": FORM, "required": list(FORM), "additionalProperties": False}
    grammar, made = json_grammar("schema", schema), []
    for prompt, output in pairs[:answers]:
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, output)]
        made.append(Answer(ids[0][-400:], np.array(ids[1][:300], np.int32), grammar))
    return made


def open_process() -> GrammarProcess:
    """Return the process that computes the masks."""
    return GrammarProcess(MODEL, Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab_size())


def run(process: GrammarProcess, kind: str, answers: int, streams: int, one_tenant: bool, forced: bool) -> Count:
    """Serve the answers, so many at a time, and count."""
    core = Scheduler("orcinus", lookahead=1, step_tokens=2048)
    blocks = 2 * streams * CONTEXT // BLOCK_SIZE
    limits = Limits(streams, blocks, BLOCK_SIZE, CONTEXT, 2048, max_drafts=MAX_DRAFTS, masks_behind_drafts=True)
    core.join(limits)
    waiting, left = deque(enumerate(recorded(kind, answers))), answers
    serving: dict[str, tuple[int, Answer]] = {}
    flight: deque[StepPlan] = deque()
    now, count = 1, Count()
    while left:
        while waiting and len(serving) < streams:
            number, answer = waiting.popleft()
            serving[f"r{number}"] = next(_keys), answer
            tenant = "" if one_tenant else str(number)
            new = NewRequest(f"r{number}", [np.array(answer.prompt, np.int32)], answer.tokens.size, tenant=tenant)
            new.payload, new.grammar = queue_pb2.Request(), kind
            core.add(new, now)
        while (plan := core.plan(now)[0]) is not None:
            flight.append(plan)
        if not flight:
            raise SystemExit("nothing can be planned")
        plan = flight.popleft()
        now += STEP_NS + TOKEN_NS * int(plan.chunk_lengths.sum()) + BESIDE_NS
        slots = plan.chunk_slots[plan.samples]
        names = [core.replicas[0].table.request[slot].id for slot in slots.tolist()]
        result = _answered(process, plan, [serving[name] for name in names], count)
        if forced and count.forced:
            told = [slot for slot, _ in count.forced], [len(some) for _, some in count.forced]
            ids = [token for _, some in count.forced for token in some]
            result.forced_tokens = np.array(told[0], np.int32), np.array(told[1], np.int32), np.array(ids, np.int32)
        core.apply(result, now)
        for name in names:
            key, answer = serving[name]
            if answer.drawn == answer.tokens.size:
                process.forget(key)
                del serving[name]
                left -= 1
    return count


def _answered(process: GrammarProcess, plan: StepPlan, rows: list[tuple[int, Answer]], count: Count) -> StepResult:
    """Return what the recorded answers have behind each row, and count."""
    samples, first = plan.samples, 0
    drafts = plan.chunk_drafts[samples] if plan.drafts.size else np.zeros(len(rows), np.int32)
    slots, drawn = plan.chunk_slots[samples], []
    count.forced = []
    for (key, answer), slot, drafted in zip(rows, slots.tolist(), drafts.tolist(), strict=True):
        guesses, first = plan.drafts[first : first + drafted], first + drafted
        text = answer.tokens[answer.drawn : answer.drawn + drafted + 1]
        right = int(np.logical_and.accumulate(text[:drafted] == guesses[: text.size]).sum()) if drafted else 0
        right = min(right, text.size - 1)
        process.masks(key, answer.grammar, answer.tokens[: answer.drawn], guesses)
        there = process.forced_tokens[right] if right < len(process.forced_tokens) else []
        if there[1:] and there[0] == text[right]:
            count.forced.append((slot, there[1:]))
        answer.drawn += right + 1
        drawn.append(text[: right + 1])
        count.rows, count.tokens = count.rows + 1, count.tokens + right + 1
        count.drafted, count.right = count.drafted + drafted, count.right + right
    result = StepResult(plan.id, plan.replica, slots, np.concatenate([np.zeros(0, np.int32), *drawn]))
    if plan.drafts.size:
        result.token_counts = np.array([tokens.size for tokens in drawn], np.int32)
    result.step_ns = STEP_NS + TOKEN_NS * int(plan.chunk_lengths.sum())
    return result


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m bench.studies.forced", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=48)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--name", default="forced", help="of the result; empty writes none")
    options = parser.parse_args(argv)
    arguments = sys.argv[1:] if argv is None else argv
    facts = provenance(["python", "-m", "bench.studies.forced", *arguments], "numpy")
    process, rows = open_process(), []
    try:
        for kind in ("records", "forms"):
            for one_tenant in (False, True):
                for streams in options.streams:
                    row: dict[str, Any] = {"kind": kind, "one_tenant": one_tenant, "streams": streams}
                    for name, forced in (("found", False), ("forced", True)):
                        count = run(process, kind, options.answers, streams, one_tenant, forced)
                        row[name] = round(count.tokens / count.rows, 3)
                        row[f"{name}_right"] = round(count.right / count.drafted, 3) if count.drafted else None
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    finally:
        process.close()
    if options.name:
        write(RESULTS / f"{options.name}.json", facts | {"answers": options.answers, "rows": rows}, rows_on_lines=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
