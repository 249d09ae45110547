"""Policies on the real stack: all presets in turn, each switched to under load, and one of parts.

No request may be lost by a switch and every token must be the reference's.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.cli.policy import switch
from services.scheduler.core.policy.presets import PRESETS
from shared.settings import CommonSettings, LauncherSettings
from tests.support.shared_prefixes import POLICY_MODEL, Load
from tests.support.shared_prefixes import load as load  # the fixture
from tests.support.stack import Stack
from tests.support.waiting import until

MODEL = POLICY_MODEL
STACK: dict[str, Any] = {
    "dtype": "float32", "block_size": 4, "max_seqs": 16, "kv_blocks": 26, "host_blocks": 32,
    "max_input_tokens": 48, "max_output_tokens": 16, "max_step_tokens": 512, "policy": "static",
    "max_wait_s": 600,  # how long requests wait depends on the machine
    "prefix_cache": "on", "stats_ms": 100,
}  # fmt: skip
PARTS = "vllm:order=fair,memory=peak,tokens=fixed-32,batch=chunked-8,relief=least-lost-swap"


def records(stack: Stack) -> set[bytes]:
    return set(stack.redis.client.scan_iter(match="*}:req:*", count=1000))


def serve(stack: Stack, load: Load, clients: ThreadPoolExecutor) -> list[Any]:
    """Send the load and wait until Redis has every request of it, so that none can be refused later."""
    known, bodies = records(stack), load.bodies()
    answers = [clients.submit(stack.post, "/v1/completions", body) for body in bodies]
    until("the load is accepted", lambda: len(records(stack) - known) >= len(bodies) or all_done(answers))
    return answers


def until_it_runs(stack: Stack, answers: list[Any]) -> None:
    def runs() -> bool:
        return int(stack.stats().get("running", 0)) > 0 or all_done(answers)

    until("the load has come", runs)


def check(answers: list[Any], load: Load) -> None:
    for index, (answer, output) in enumerate(zip(answers, load.outputs, strict=True)):
        response = answer.result()
        assert response.status_code == 200, response.text
        assert [choice["token_ids"] for choice in response.json()["choices"]] == [output] * load.choices(index)


def common(stack: Stack) -> CommonSettings:
    return CommonSettings(redis_url=stack.redis.url, model=stack.model)


def policy_events(stack: Stack) -> list[dict[str, str]]:
    rows: Any = stack.redis.client.xrange(stack.keys.events)
    events = [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in rows]
    return [event for event in events if event["kind"].startswith("policy_")]


def test_switch_to_each_preset_under_load_loses_nothing(stack: Stack, load: Load) -> None:
    with ThreadPoolExecutor(len(load.prompts)) as clients:
        for name in PRESETS:
            answers = serve(stack, load, clients)
            until_it_runs(stack, answers)
            answer = switch(name, common(stack), LauncherSettings(), 60, print)
            assert answer.changed, answer.text
            check(answers, load)
            until("the stats have the policy", lambda name=name: stack.stats()["policy"] == name)
    events = policy_events(stack)
    assert [(event["kind"], event["policy"]) for event in events] == [("policy_changed", name) for name in PRESETS]
    stack.settled_empty()
    stats = stack.stats()
    for counter in ("preemptions", "recomputed_tokens", "swapped_blocks", "prefix_hit_tokens"):
        assert int(stats[counter]) > 0, counter
    assert stack.kill("scheduler", signal.SIGKILL) == -signal.SIGKILL
    stack.start("scheduler")
    until("the restart restores the policy", lambda: len(policy_events(stack)) > len(events))
    until("the gateway has seen the scheduler that was restarted", stack.ready)
    assert policy_events(stack)[-1]["policy"] == list(PRESETS)[-1] != stack.settings["policy"]


def test_urgent_request_is_served_before_a_waiting_crowd(stack: Stack, load: Load) -> None:
    assert switch("orcinus", common(stack), LauncherSettings(), 60, print).changed
    crowd = {"prompt": load.prompts[0], "max_tokens": 16, "n": 128, "ignore_eos": True, "deadline_ms": 15000}
    probe = {"prompt": load.prompts[1], "max_tokens": 1, "ttft_slo_ms": 1}

    def refusal() -> str:
        answer = stack.post("/v1/completions", {**probe, "priority": "low", "deadline_ms": 50})
        message = str(answer.json()["error"]["message"]) if answer.status_code == 429 else ""
        return message if "sequences wait for slots or memory" in message else ""

    with ThreadPoolExecutor(8) as clients:
        patient = {**crowd, "priority": "low"}
        crowds = [clients.submit(stack.post, "/v1/completions", patient) for _ in range(8)]
        message = until("the forecast reaches the gateway", refusal)
        urgent = stack.post("/v1/completions", {**probe, "priority": "realtime"})
        waited = int(stack.stats()["waiting_low"])
        assert all(each.result().status_code in (200, 429) for each in crowds)
    assert "start a second" in message and "prompt tokens" not in message
    assert urgent.status_code == 200, urgent.text
    assert waited > 0, "low requests waited when the urgent one had its token"
    assert stack.settled()["pending"] == [0, 0, 0, 0]
    patient = {"prompt": load.prompts[1], "max_tokens": 1, "priority": "low"}
    until("the gateway forgets the wait", lambda: stack.post("/v1/completions", patient).status_code == 200)


def test_restart_with_a_policy_of_parts_continues_requests(stack: Stack, load: Load) -> None:
    with ThreadPoolExecutor(len(load.prompts)) as clients:
        answers = serve(stack, load, clients)
        until_it_runs(stack, answers)
        assert stack.kill("scheduler", signal.SIGTERM) == 0
        stack.settings["policy"] = PARTS
        stack.start("scheduler")
        check(answers, load)
        until("the stats have the policy", lambda: stack.stats()["policy"] == PARTS)
    until("the gateway has seen the scheduler that was restarted", stack.ready)


def all_done(answers: list[Any]) -> bool:
    return all(answer.done() for answer in answers)
