"""The `policy` command: each ends in one event, and the change is told when it has happened."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.types import Limits, NewRequest, StepResult
from services.scheduler.policy_switch import PolicySwitch, make_scheduler
from shared.settings import SchedulerSettings

STEP_NS = 1_000_000
KEY = "policy:shard-0"
LIMITS = Limits(slots=4, blocks=64, block_size=4, max_model_len=64, max_step_tokens=64)


def test_policy_takes_over_when_idle_and_answers_each_command_once() -> None:
    core = make_scheduler(SchedulerSettings(policy="orca", lookahead=0))
    events: list[tuple[str, str]] = []

    def tell(kind: str, text: str, **ids: Any) -> None:
        assert text
        events.append((kind, ids["policy"]))

    switch = PolicySwitch(core, tell, KEY)
    core.join(LIMITS)
    core.add(NewRequest("runs", [np.arange(5, dtype=np.int32)], max_tokens=3), 0)
    plan, _ = core.plan(1)
    core.add(NewRequest("waits", [np.arange(5, dtype=np.int32)], max_tokens=3), 2)
    switch.request("sarathi")
    switch.request("worst")
    assert events == [("policy_refused", "worst")]
    switch.request("tgi")
    switch.request("tgi")
    assert events[1:] == [("policy_refused", "sarathi")]
    now = 2
    while plan is not None and "waits" not in {enter.request.id for enter in plan.enters}:
        assert (switch.name, core.policy.name) == ("orca", "orca")
        now += STEP_NS
        sampled = plan.chunk_slots[plan.samples]
        core.apply(StepResult(plan.id, 0, sampled, sampled * 0, step_ns=STEP_NS), now)
        plan, _ = core.plan(now)
        switch.look()
    assert plan is not None
    assert events[2:] == [("policy_changed", "tgi")]
    assert switch.name == "tgi"
    switch.look()
    assert len(events) == 3


def test_policy_in_force_undoes_a_pending_change() -> None:
    core = make_scheduler(SchedulerSettings(policy="orca:tokens=fixed-9", lookahead=0))
    events: list[tuple[str, str, str]] = []
    switch = PolicySwitch(core, lambda kind, text, **ids: events.append((kind, ids["policy"], text)), KEY)
    core.join(LIMITS)
    core.add(NewRequest("runs", [np.arange(5, dtype=np.int32)], max_tokens=30), 0)
    plan, _ = core.plan(1)
    assert plan is not None
    switch.request("tgi")
    core.add(NewRequest("waits", [np.arange(3, dtype=np.int32)], max_tokens=3), 2)
    core.apply(StepResult(plan.id, 0, plan.chunk_slots, plan.chunk_slots * 0, step_ns=STEP_NS), STEP_NS)
    plan, _ = core.plan(STEP_NS)
    assert plan is not None and not plan.enters, "no sequence enters while a change is pending"
    in_force = core.policy
    switch.request("orca:tokens=fixed-9")
    assert [event[:2] for event in events] == [("policy_refused", "tgi"), ("policy_changed", "orca:tokens=fixed-9")]
    assert "no change is pending" in events[1][2]
    core.apply(StepResult(plan.id, 0, plan.chunk_slots, plan.chunk_slots * 0, step_ns=STEP_NS), 2 * STEP_NS)
    plan, _ = core.plan(2 * STEP_NS)
    switch.look()
    assert plan is not None and [enter.request.id for enter in plan.enters] == ["waits"]
    assert core.policy is in_force and len(events) == 2
    switch.request("tgi")
    switch.request("tgi:order=fair")
    assert events[2:] == [("policy_refused", "tgi", "tgi:order=fair was requested before it could take over")]


def test_settings_decide_over_prefix_cache_or_leave_it_to_policy() -> None:
    found = {}
    for policy in ("orca", "sglang"):
        for choice in ("auto", "on", "off"):
            core = make_scheduler(SchedulerSettings(policy=policy, prefix_cache=choice))
            found[policy, choice] = core.replicas[core.join(LIMITS)].prefix_cache is not None
    assert [key for key, kept in found.items() if kept] == [("orca", "on"), ("sglang", "auto"), ("sglang", "on")]


@pytest.mark.parametrize("policies", [("orcinus", "orcinus:order=fair"), ("vllm", "orcinus"), ("orcinus", "vllm")])
@pytest.mark.parametrize("restored", [True, False], ids=["restored", "learned"])
def test_lengths_of_finished_requests_outlive_change_of_policy(policies: tuple[str, str], restored: bool) -> None:
    core = make_scheduler(SchedulerSettings(policy=policies[0]))
    seen = {35: [300] * 40, 128: [300] * 40}
    if restored or policies[0] == "vllm":
        core.restore_lengths(seen)
    else:
        core.policy.memory.restore(seen)
    core.switch(policies[1])
    core.join(Limits(slots=4, blocks=64, block_size=4, max_model_len=64, max_step_tokens=64))
    core.plan(1)
    assert core.policy.name == policies[1] and core.lengths() == seen
    assert core.policy.memory.snapshot() == ({} if policies[1] == "vllm" else seen)


def restarted(configured: str, stored: bytes | None) -> tuple[str, list[Any]]:
    """Return the policy in force after the first plan of a new scheduler, and the commands beside its events."""
    core = make_scheduler(SchedulerSettings(policy=configured))
    commands: list[Any] = []
    switch = PolicySwitch(core, lambda kind, text, first, policy: commands.append(first), KEY)
    switch.restore(stored)
    core.join(LIMITS)
    core.plan(1)
    switch.look()
    return switch.name, commands


def test_record_outlives_a_restart_unless_it_names_the_configured_policy() -> None:
    record = json.dumps({"policy": "sarathi", "configured": "orcinus"})
    assert restarted("orcinus", record.encode()) == ("sarathi", [["SET", KEY, record]])
    record = json.dumps({"policy": "orcinus", "configured": "orcinus"})
    assert restarted("orcinus", record.encode()) == ("orcinus", [["DEL", KEY]])


@pytest.mark.parametrize(
    "stored",
    [None, b"", b"[]", b"{broken", b'{"policy": "fifo", "configured": "orcinus"}', b'{"configured": "orcinus"}',
     b'{"policy": "sarathi", "configured": "vllm"}'],
    ids=["none", "empty", "list", "broken", "unknown", "nameless", "configured anew"],
)  # fmt: skip
def test_record_that_does_not_hold_is_not_restored(stored: bytes | None) -> None:
    assert restarted("orcinus", stored) == ("orcinus", [])
