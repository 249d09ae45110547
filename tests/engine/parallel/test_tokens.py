"""Replicas of several ranks give the tokens of one process: whatever the ranks, the policy and what is in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor

from bench.engine.ranks import Replica
from protos import worker_pb2
from services.scheduler.core.types import NewRequest
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from shared.errors import RankError
from shared.text.logprobs import unpack_records
from shared.wire.columns import pack, unpack
from tests.engine.driver import Ahead, Driver, entering, generated, make_engine
from tests.engine.ranks import Processes, give_masks, hold_masks
from tests.support import in_process
from tests.support.checkpoints.models import VOCAB, Case, Reference, make_llama, random_prompts
from tests.support.compiler import demand_compiler
from tests.support.shared_prefixes import Load
from tests.support.shared_prefixes import load as load  # the fixture

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
}
MODEL = {"seed": 5, "requests": 4, "prompt_tokens": (12, 40), **SHAPE}
SMALL = {"kv_blocks": 26, "max_seqs": 16, "max_input_tokens": 48, "max_output_tokens": 16, "max_step_tokens": 512}
"""A pool in which policies have to preempt and to swap."""
KERNELS: dict[str, dict[str, Any]] = {
    "reference": {**SMALL, "kernels": "reference", "host_blocks": 32},
    "cpu": {**SMALL, "kernels": "cpu", "host_blocks": 16, "block_size": 16, "kv_blocks": 10, "deterministic": True},
}


@pytest.mark.parametrize(("tp", "pp", "kernels"), [(2, 1, "cpu"), (2, 2, "cpu"), (1, 4, "cpu"), (3, 1, "reference")])
def test_chunking_preempting_and_swapping_give_the_references_tokens(
    processes: Processes, reference: Reference, load: Load, tp: int, pp: int, kernels: str
) -> None:
    demand_compiler(kernels)
    with processes.replica(tp, pp, reference.path, **KERNELS[kernels]) as replica:
        assert replica.info().stages == pp
        for policy, lookahead in (("orcinus:memory=watermark", 1), ("vllm", 0)):
            recorded, core = in_process.run(replica, load.requests(), policy, microbatches=pp, lookahead=lookahead)
            load.check(recorded)
            stats = core.stats()
            assert stats["preemptions"] > 0
            assert stats["swapped_blocks"] > 0
            assert stats["blocks_draining"] == 0


class Microbatches(Ahead):
    """Steps that compute all that is known of some slots, which then sample, or their last token."""

    def __init__(self, engine: Replica) -> None:
        super().__init__(engine)
        self.known: dict[int, int] = {}

    def enter(self, slot: int, tokens: list[int], **fields: Any) -> worker_pb2.Enter:
        self.known[slot] = len(tokens)
        return entering(slot, tokens, **fields)

    def give(self, slots: list[int], **fields: Any) -> InFlightStep:
        entered = {enter.slot for enter in fields.get("enters", ())}
        starts = {slot: 0 if slot in entered else self.known[slot] - 1 for slot in slots}
        chunks = {slot: (start, self.known[slot] - start) for slot, start in starts.items()}
        for slot in slots:
            self.known[slot] += 1
        return self.submit(chunks, **fields)


def grammar_row(replica: Replica, reference: Reference, are_late: bool) -> tuple[Microbatches, list[list[int]]]:
    """Return slot 0 with the first prompt, slot 1 with another and a grammar, after four outputs of each; and the late
    slots of each step.
    """
    ahead, late = Microbatches(replica), []
    digits = worker_pb2.Sampling(grammar=LLMatcher.grammar_from_regex("[0-9]{40}"), top_p=1)
    enters = [ahead.enter(0, reference.prompts[0]), ahead.enter(1, reference.prompts[1], sampling=digits)]
    flights = [ahead.give([0, 1], enters=enters)]
    if are_late and replica.info().stages > 1:
        flights.append(ahead.give([0, 1]))  # sent before anyone knows
    for flight in flights:
        late.append(unpack(ahead.finish(flight).late_slots).tolist())
    if are_late:
        replica.everywhere(give_masks)
    for _ in range(600):
        outputs = {slot: len(ahead.outputs.get(slot, ())) for slot in (0, 1)}
        slots = [slot for slot, count in outputs.items() if count < 4]
        if not slots:
            return ahead, late
        ahead.known[1] = len(reference.prompts[1]) + outputs[1]
        ahead.finish(ahead.give(slots))
    raise AssertionError(f"outputs {ahead.outputs}, errors {ahead.errors}")


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_row_without_its_mask_sits_out_on_every_rank(
    processes: Processes, reference: Reference, tp: int, pp: int
) -> None:
    """A rank that took it for drawn would stop, or compute another token than the others."""
    with processes.replica(tp, pp, reference.path, kernels="reference") as replica:
        expected, none = grammar_row(replica, reference, are_late=False)
        replica.everywhere(hold_masks)
        late, slots = grammar_row(replica, reference, are_late=True)
        replica.engine.grammars.close()
    assert none == [[]] and slots == [[1]] * pp
    assert late.outputs == expected.outputs and not late.errors
    assert late.outputs[0] == reference.outputs[0][:4]


def test_slot_reused_in_the_pipe_keeps_the_new_sequence(processes: Processes, reference: Reference) -> None:
    with processes.replica(1, 2, reference.path, kernels="reference") as replica:
        ahead, prompts = Microbatches(replica), reference.prompts
        first = ahead.give([0], enters=[ahead.enter(0, prompts[0])])
        second = ahead.give([1], enters=[ahead.enter(1, prompts[1])])
        third = ahead.give([0])
        # The client of slot 0 has left while two of its steps are out, and another sequence comes.
        fourth = ahead.give([0], free_slots=pack([0]), enters=[ahead.enter(0, prompts[2])])
        for flight in (first, second, third, fourth):
            ahead.finish(flight)
        assert ahead.outputs[0] == [*reference.outputs[0][:2], reference.outputs[2][0]]
        for _ in range(8):
            for flight in [ahead.give([0]), ahead.give([1])]:
                ahead.finish(flight)
        assert ahead.outputs[0][2:] == reference.outputs[2][:9]
        assert ahead.outputs[1] == reference.outputs[1][:9]


def test_sequence_that_cannot_be_drawn_fails_alone_at_every_rank(processes: Processes, reference: Reference) -> None:
    """Steps of it that are in flight fail too; the others go on, and its slot serves the next sequence."""
    everything = pack(list(range(VOCAB)))
    with processes.replica(2, 2, reference.path, kernels="reference") as replica:
        ahead, prompts = Microbatches(replica), reference.prompts
        enters = [
            ahead.enter(0, prompts[0]),
            ahead.enter(1, prompts[1], sampling=worker_pb2.Sampling(top_p=1, banned_ids=everything)),
            ahead.enter(2, prompts[2], sampling=worker_pb2.Sampling(top_p=1, grammar="not a grammar")),
            ahead.enter(3, prompts[3], sampling=worker_pb2.Sampling(top_p=7)),
        ]
        ahead.finish(ahead.give([0, 1, 2, 3], enters=enters))
        assert ahead.errors == {1: "nothing_allowed", 2: "grammar", 3: "invalid_sampling"}
        ahead.errors.clear()
        ahead.finish(ahead.give([0, 1, 2, 3]))
        assert ahead.errors == {1: "nothing_allowed", 2: "grammar", 3: "invalid_sampling"}
        fresh = [ahead.enter(slot, prompts[slot]) for slot in (1, 2)]
        ahead.finish(ahead.give([0, 1, 2], free_slots=pack([1, 2, 3]), enters=fresh))
        for _ in range(4):
            ahead.finish(ahead.give([0, 1, 2]))
        assert ahead.outputs[0] == reference.outputs[0][:7]
        assert [ahead.outputs[slot] for slot in (1, 2)] == [reference.outputs[slot][:5] for slot in (1, 2)]


def sampled(engine: Engine | Replica, pp: int) -> in_process.Recorded:
    """Temperatures, penalties, a grammar and log-probabilities."""
    digits = LLMatcher.grammar_from_regex("[0-9]{40}")

    def request(at: int, prompt: list[int]) -> NewRequest:
        grammar = digits if at == 5 else ""
        return in_process.request(
            f"r{at}", prompt, 16, temperature=0.9 * (at % 3), seed=40 + at, repetition_penalty=1.5,
            presence_penalty=0.4, top_k=12, logprobs=at % 4, grammar=grammar,
        )  # fmt: skip

    prompts = random_prompts(6, (2, 40), 11)
    made = [request(at, prompt) for at, prompt in enumerate(prompts)]
    return in_process.run(engine, made, "orcinus", microbatches=pp, lookahead=1)[0]


def test_seeded_draws_and_logprobs_equal_those_of_one_process(processes: Processes, reference: Reference) -> None:
    expected = sampled(make_engine(reference.path, kernels="reference"), 1)
    with processes.replica(2, 2, reference.path, kernels="reference") as replica:
        found = sampled(replica, 2)
    assert not expected.errors and not found.errors
    assert found.tokens == expected.tokens
    assert all(token in range(ord("0"), ord("9") + 1) for token in found.tokens["r5", 0])
    assert found.logprobs.keys() == expected.logprobs.keys()
    assert any(expected.logprobs.values())
    for at, records in expected.logprobs.items():
        wanted = int(at[0][1:]) % 4
        for one, other in zip(unpack_records(found.logprobs[at], wanted), unpack_records(records, wanted), strict=True):
            assert one.sampled_logprob == pytest.approx(other.sampled_logprob, abs=1e-3)
            assert dict(one.best) == pytest.approx(dict(other.best), abs=1e-3)


def test_warm_up_of_all_ranks_tells_how_long_steps_take(processes: Processes, reference: Reference) -> None:
    with processes.replica(2, 2, reference.path, kernels="reference", **SMALL) as replica:
        replica.warm_up()
        assert replica.info().largest_step_ms > 0
        assert Driver(replica).share > 0


def test_death_of_a_rank_is_an_error_of_the_others(reference: Reference) -> None:
    separate = Processes()
    try:
        with separate.replica(1, 2, reference.path, kernels="reference") as replica:
            ahead = Microbatches(replica)
            ahead.finish(ahead.give([0], enters=[ahead.enter(0, reference.prompts[0])]))
            separate.kill(0)
            with pytest.raises(RankError):
                for _ in range(4):
                    ahead.finish(ahead.give([0]))
    finally:
        separate.stop()


CUT_BY_INPUTS = ("o_proj.weight", "down_proj.weight")
TOKENS = 32
INT8 = {"kernels": "cpu", "quantize": "int8", "block_size": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    demand_compiler()
    return make_llama(tmp_path_factory.mktemp("int8") / "tiny", seed=31, requests=1, num_hidden_layers=4)


def rounded(weight: Tensor, parts: int) -> Tensor:
    """[outputs, inputs]: multiples of max |w| / 127 of the row, of each of so many parts of its inputs."""
    pieces = []
    for piece in weight.chunk(parts, dim=1):
        scale = piece.abs().amax(dim=1, keepdim=True) / 127
        pieces.append((piece / scale).round() * scale)
    return torch.cat(pieces, dim=1)


def cases(checkpoint: Reference, tp: int) -> list[Case]:
    """transformers with the weights of `tp` ranks: what it answers."""
    reference = Reference(checkpoint.path)
    with torch.no_grad():
        for name, weight in reference.model.named_parameters():
            if ".layers." in name and weight.ndim == 2:
                weight.copy_(rounded(weight, tp if name.endswith(CUT_BY_INPUTS) else 1))
    return reference.cases(6, (4, 60), TOKENS, seed=37)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_int8_ranks_give_the_tokens_of_their_rounded_weights(
    processes: Processes, checkpoint: Reference, tp: int, pp: int
) -> None:
    asked = cases(checkpoint, tp)
    with processes.replica(tp, pp, checkpoint.path, **INT8) as replica:
        found = generated(replica, [case.prompt for case in asked], TOKENS, microbatches=pp, lookahead=1)
    assert found == [case.tokens for case in asked]
