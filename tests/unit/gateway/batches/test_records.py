"""Batches on disk: one gateway at a time may say how far one is, and each row of the journals counts once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from services.gateway.batches import journal, records
from services.gateway.batches.files import new_id
from services.gateway.batches.journal import Journal, journal_name, rows, write_outputs
from services.gateway.batches.records import BatchStore, OpenBatch, Outdated
from services.gateway.errors import ApiError
from tests.unit.gateway.batches.disk import TENANT, begun, lines_of, ordered, stores, upload


def ended(batches: BatchStore, batch: OpenBatch, epoch: int) -> None:
    state = batches.take_over(batch, epoch)
    batches.close(batch, state.move("completed", 1_000_000_000))


def test_new_batch_waits_for_a_gateway(tmp_path: Path) -> None:
    files, batches = stores(tmp_path)
    assert batches.find_unfinished() == []
    order, batch = ordered(files, batches, lines_of(2))
    assert batches.find_unfinished() == [batch]
    assert batches.order(batch) == order
    found = batches.find(TENANT, order.id)
    assert (found.status, found.order) == ("validating", order)
    assert batches.ids(TENANT) == [order.id] and batches.ids("tenant-2") == []
    with pytest.raises(ApiError, match="not found"):
        batches.find("tenant-2", order.id)


def test_deleted_input_stays_for_its_batch(tmp_path: Path) -> None:
    files, batches, order, batch = begun(tmp_path)
    files.delete(TENANT, order.input_file_id)
    assert (batches.folder(batch.owner, batch.id) / "input").read_bytes() == lines_of(2)


def test_batch_that_has_ended_is_deleted_with_its_files(tmp_path: Path) -> None:
    files, batches, order, batch = begun(tmp_path)
    with pytest.raises(ApiError, match="its status is validating; cancel it first"):
        batches.delete(TENANT, order.id)
    output, other = (upload(files, b"{}\n").id for _ in range(2))
    state = batches.take_over(batch, 1)
    batches.close(batch, state.move("completed", 1.0, output_file_id=output, error_file_id=new_id("file-")))
    with pytest.raises(ApiError, match="not found"):
        batches.delete("tenant-2", order.id)
    batches.delete(TENANT, order.id)
    assert (batches.ids(TENANT), [file.id for file in files.of_tenant(TENANT)]) == ([], [other])


def test_earlier_epoch_writes_nothing_that_counts(tmp_path: Path) -> None:
    _, batches, order, batch = begun(tmp_path, 9)
    folder = batches.folder(batch.owner, batch.id)
    first = batches.take_over(batch, 5)
    one = Journal(folder, 5)
    one.append([(0, False, b'{"by":5}'), (1, True, b'{"by":5}')])
    with (folder / journal_name(5)).open("ab") as cut:
        cut.write(b'2 0 {"by":')  # a kill cuts a row
    second = batches.take_over(batch, 7)
    two = Journal(folder, 7)
    one.append([(3, False, b'{"by":5}')])
    two.append([(3, False, b'{"by":7}'), (2, False, b'{"by":7}'), (0, False, b'{"by":7}')])
    for late in (replace(first, completed=9), first.move("completed", 1.0)):
        with pytest.raises(Outdated):
            batches.write(batch, late)
        with pytest.raises(Outdated):
            batches.close(batch, late)
    with pytest.raises(Outdated):
        batches.take_over(batch, 6)
    assert batches.find(TENANT, order.id).state == second
    counted = rows(folder, second.sealed, 7)
    parts = folder / "good", folder / "bad"
    assert write_outputs(folder, counted, parts) == (3, 1, 0)
    assert parts[0].read_bytes() == b'{"by":5}\n{"by":7}\n{"by":7}\n'
    assert parts[1].read_bytes() == b'{"by":5}\n'
    assert rows(folder, batches.take_over(batch, 8).sealed, 8).keys() == {0, 1, 2, 3}
    one.close()
    two.close()


def test_batch_that_fails_again_and_again_does_not_grow(tmp_path: Path) -> None:
    _, batches, _, batch = begun(tmp_path, 9)
    folder = batches.folder(batch.owner, batch.id)
    for epoch in range(1, 9):
        state = batches.take_over(batch, epoch)
        (folder / f".good-{epoch}").write_bytes(b"")
        one = Journal(folder, epoch)
        if epoch == 3:
            one.append([(0, False, b'{"by":3}')])
        one.close()
    assert [epoch for epoch, _ in state.sealed] == [3]
    names = {journal_name(3), journal_name(8), "state-0000000000000008.json", ".good-8", "batch.json", "input"}
    assert set(os.listdir(folder)) == names


def test_nothing_is_written_behind_a_row_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Journal(tmp_path, 7)
    one.append([(0, False, b'{"by":7}')])
    with monkeypatch.context() as patch:
        patch.setattr(journal, "flush", full)
        with pytest.raises(OSError, match="full"):
            one.append([(1, False, b'{"by":7}')])
    with pytest.raises(OSError, match="full"):
        one.append([(2, False, b'{"by":7}')])
    one.close()
    assert 2 not in rows(tmp_path, [], 7)


def full(_: BinaryIO) -> None:
    raise OSError("the disk is full")


def test_batch_that_ended_is_driven_by_no_gateway(tmp_path: Path) -> None:
    _, batches, order, batch = begun(tmp_path)
    ended(batches, batch, 3)
    assert batches.find_unfinished() == []
    with pytest.raises(Outdated):
        batches.take_over(batch, 4)
    names = sorted(os.listdir(batches.folder(batch.owner, batch.id)))
    assert names == ["batch.json", "state-0000000000000003.json"]
    with pytest.raises(ApiError, match="status is completed") as raised:
        batches.cancel(TENANT, order.id)
    assert raised.value.status == 409
    assert batches.order(batch) is None


def test_cancel_is_seen_by_every_gateway(tmp_path: Path) -> None:
    _, batches, order, batch = begun(tmp_path)
    assert not batches.is_cancelled(batch)
    found = batches.cancel(TENANT, order.id)
    assert (found.status, found.state.status) == ("cancelling", "validating")
    assert batches.cancel(TENANT, order.id) == found
    assert stores(tmp_path)[1].is_cancelled(batch)


def test_marker_without_a_batch_goes_when_it_is_old(tmp_path: Path) -> None:
    files, batches, _, batch = begun(tmp_path)
    folder = batches.folder(batch.owner, batch.id)
    folder.rename(folder.with_name(".new"))  # a gateway is about to make it
    assert batches.order(batch) is None and batches.find_unfinished() == [batch]
    assert files.root is not None
    for marker in (files.root / "open").iterdir():
        os.utime(marker, (0, 0))
    assert batches.order(batch) is None and batches.find_unfinished() == []


def test_oldest_batch_that_ended_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_BATCHES", 2)
    files, batches = stores(tmp_path)
    made = [ordered(files, batches, lines_of(1)) for _ in range(2)]
    stored = upload(files, lines_of(1))
    another = replace(made[0][0], id=new_id("batch_"), input_file_id=stored.id)
    with pytest.raises(ApiError, match="2 have not ended") as raised:
        batches.create(another)
    assert (raised.value.status, raised.value.code) == (429, "too_many_batches")
    ended(batches, made[1][1], 3)
    batches.create(another)
    assert batches.ids(TENANT) == [made[0][0].id, another.id]


def test_old_batches_are_swept(tmp_path: Path) -> None:
    _, batches, order, batch = begun(tmp_path, 1)
    batches.sweep(batch.owner, 0.0)
    assert batches.find(TENANT, order.id).status == "validating"
    ended(batches, batch, 3)
    batches.sweep(batch.owner, 1e12)
    assert batches.find(TENANT, order.id).status == "completed"
    batches.sweep(batch.owner, 0.0)
    assert batches.ids(TENANT) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[", b'{"id": 1}'])
def test_record_that_cannot_be_read_is_no_batch(tmp_path: Path, content: bytes) -> None:
    _, batches, order, batch = begun(tmp_path, 1)
    (batches.folder(batch.owner, batch.id) / "batch.json").write_bytes(content)
    with pytest.raises(ApiError, match="not found"):
        batches.find(TENANT, order.id)
    assert batches.get(TENANT, order.id) is None
