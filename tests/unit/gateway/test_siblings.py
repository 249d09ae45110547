"""The metrics of several processes as one text, read by Prometheus's own parser."""

from __future__ import annotations

import asyncio
import secrets
import socket

import pytest
import uvloop
from prometheus_client.metrics_core import Sample
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.metrics import Metrics
from services.gateway.processes import LENGTH_BYTES, Place, Siblings, labelled, merged


def texts(*counts: int) -> list[bytes]:
    found = []
    for number, count in enumerate(counts):
        metrics = Metrics("m", aliases=True)
        for _ in range(count):
            metrics.answers.labels('/a "quoted" \n# HELP x y', "200").inc()
        metrics.delivered(10 * count, None)
        found.append(labelled(metrics.registry, str(number)))
    return found


def samples_of(text: bytes) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]


@pytest.mark.parametrize("counts", [(3,), (3, 4), (3, 0, 5)])
def test_merged_metrics_hold_each_sample_once_with_its_process(counts: tuple[int, ...]) -> None:
    parts = texts(*counts)
    names = [family.name for family in text_string_to_metric_families(merged(parts).decode())]
    assert len(set(names)) == len(names)
    samples = samples_of(merged(parts))
    assert {sample.labels["process"] for sample in samples} == {str(number) for number in range(len(counts))}
    single = [sample for part in parts for sample in samples_of(part)]
    key = lambda each: (each.name, sorted(each.labels.items()), each.value)  # noqa: E731
    assert sorted(map(key, samples)) == sorted(map(key, single))
    tokens = {
        each.labels["process"]: each.value for each in samples if each.name == "orcinus_gateway_output_tokens_total"
    }
    assert tokens == {str(number): 10.0 * count for number, count in enumerate(counts)}


def test_process_without_an_answer_is_left_out() -> None:
    first, _ = texts(1, 2)
    assert merged([first]) == merged([first, b""])


def test_answer_cut_by_a_kill_is_left_out() -> None:
    uvloop.run(asked_while_one_is_killed())  # as the gateway runs


async def asked_while_one_is_killed() -> None:
    registries = [Metrics("m", aliases=False).registry for _ in range(3)]
    group = secrets.token_hex(8)
    places = [Place(number, 3, group) for number in range(3)]
    first, second = (Siblings(places[number], registries[number], dict) for number in range(2))
    text = labelled(registries[2], "2")

    async def killed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write((len(text).to_bytes(LENGTH_BYTES) + text)[: len(text) // 2])
        await writer.drain()
        writer.close()

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(places[2].address(2))
    server = await asyncio.start_unix_server(killed, sock=listener)
    try:
        for each in (first, second):
            await each.start()
        assert {sample.labels["process"] for sample in samples_of(await first.metrics())} == {"0", "1"}
    finally:
        server.close()
        for each in (first, second):
            await each.stop()
