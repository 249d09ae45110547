"""Files and batches in a temporary folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson

from services.gateway.batches.files import FileStore, StoredFile, new_id
from services.gateway.batches.records import BatchOrder, BatchStore, OpenBatch
from shared.settings import GatewaySettings

TENANT = "tenant-1"
URL = "/v1/completions"


def stores(folder: Path, **settings: Any) -> tuple[FileStore, BatchStore]:
    files = FileStore(GatewaySettings(files_dir=folder, **settings))
    return files, BatchStore(files)


def upload(files: FileStore, content: bytes, tenant: str = TENANT) -> StoredFile:
    begun = files.begin(tenant)
    try:
        begun.write(content)
        begun.close()
        return files.commit(tenant, begun, "in.jsonl", "batch")
    finally:
        begun.discard()


def lines_of(count: int, **body: Any) -> bytes:
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": URL, "body": {"prompt": f"{n:03}", **body}}
        for n in range(count)
    ]
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def ordered(
    files: FileStore, batches: BatchStore, content: bytes, window_s: int = 3600, tenant: str = TENANT
) -> tuple[BatchOrder, OpenBatch]:
    """Return a new batch over a file with that content."""
    now = int(time.time())
    stored = upload(files, content, tenant)
    order = BatchOrder(new_id("batch_"), tenant, "key-1", URL, stored.id, "1h", now, now + window_s)
    batches.create(order)
    return order, OpenBatch(now, files.owner(tenant), order.id)


def begun(folder: Path, count: int = 2) -> tuple[FileStore, BatchStore, BatchOrder, OpenBatch]:
    """Return stores with a new batch of `count` lines."""
    files, batches = stores(folder)
    return files, batches, *ordered(files, batches, lines_of(count))
