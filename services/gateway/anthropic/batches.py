"""Serve `/v1/messages/batches`: Anthropic's batches of messages, over the batches of openai/batches.py.

The requests become the lines of a file of the caller, which is deleted with the batch. A batch of messages differs from
others only in its endpoint and in the form in which its state and its answers are returned.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, BinaryIO

import orjson
from fastapi import APIRouter, Query, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response, StreamingResponse

from services.gateway.anthropic.bodies import MessagesErrorAnswer
from services.gateway.batches.files import FileStore, new_id
from services.gateway.batches.records import ENDED, Batch, BatchOrder, BatchStore
from services.gateway.errors import MESSAGES, ApiError, invalid
from services.gateway.gateway import Gateway
from services.gateway.openai.answers import json_response
from services.gateway.openai.bodies import Body, read_body
from services.gateway.openai.document import FOUND, body_of, errors
from shared.messages import quote

PATH = "/v1/messages/batches"
WINDOW_H = 24
MAX_BATCHES = 1000
"""Of one page of the list."""
LINES_AT_ONCE = 256
"""Of the results, read by one call of a thread."""
_RESULTS = {
    "description": "a JSON object with custom_id and result for each request",
    "content": {"application/x-jsonl": {"schema": {"type": "string", "format": "binary"}}},
}
BatchId = Annotated[str | None, Query(max_length=128)]


class BatchRequest(Body):
    """One of `requests`. params: the body of `POST /v1/messages`, which is checked when its turn comes."""

    custom_id: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchBody(Body):
    """`POST /v1/messages/batches`."""

    requests: list[BatchRequest] = Field(min_length=1, fail_fast=True)


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()
    batches, files = gateway.batches.batches, gateway.batches.files

    def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
        return errors(404, *statuses, model=MessagesErrorAnswer)

    @routes.post(PATH, responses={200: FOUND, **refusals(413, 415, 429, 503)}, openapi_extra=body_of(MessageBatchBody))
    async def create_message_batch(request: Request) -> Response:
        """Begin to answer many requests to `/v1/messages` where there is room."""
        body = await read_body(request, MessageBatchBody)
        caller = request.state.caller
        batch = await files.in_thread(
            _create, batches, files, body, caller.tenant, caller.bucket, gateway.settings.max_body_bytes
        )
        gateway.batches.wake()
        return json_response(_body(batch))

    @routes.get(PATH, responses={200: FOUND, **refusals()})
    async def list_message_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_BATCHES)] = 20,
        after_id: BatchId = None,
        before_id: BatchId = None,
    ) -> Response:
        """List the caller's batches of messages, the newest first, a page at a time."""
        return json_response(await files.in_thread(_page, batches, request.state.tenant, limit, after_id, before_id))

    @routes.get(PATH + "/{batch_id}", responses={200: FOUND, **refusals()})
    async def message_batch(batch_id: str, request: Request) -> Response:
        """Return a batch of messages."""
        return json_response(await files.in_thread(_find_body, batches, request.state.tenant, batch_id))

    @routes.get(PATH + "/{batch_id}/results", responses={200: _RESULTS, **refusals(409)})
    async def message_batch_results(batch_id: str, request: Request) -> Response:
        """Return the result of each request of a batch that has ended."""
        lines = await files.in_thread(_results, batches, files, request.state.tenant, batch_id)
        return StreamingResponse(_pieces(files, lines), media_type="application/x-jsonl")

    @routes.post(PATH + "/{batch_id}/cancel", responses={200: FOUND, **refusals(409)})
    async def cancel_message_batch(batch_id: str, request: Request) -> Response:
        """Cancel a batch; what was answered until then stays."""

        def cancel(tenant: str) -> dict[str, Any]:
            _find(batches, tenant, batch_id)
            batches.cancel(tenant, batch_id)
            return _find_body(batches, tenant, batch_id)

        return json_response(await files.in_thread(cancel, request.state.tenant))

    @routes.delete(PATH + "/{batch_id}", responses={200: FOUND, **refusals(409)})
    async def delete_message_batch(batch_id: str, request: Request) -> Response:
        """Delete a batch that has ended, and its results."""

        def delete(tenant: str) -> None:
            _find(batches, tenant, batch_id)
            batches.delete(tenant, batch_id)

        await files.in_thread(delete, request.state.tenant)
        return json_response({"id": batch_id, "type": "message_batch_deleted"})

    return routes


# The functions below block.


def _create(
    batches: BatchStore, files: FileStore, body: MessageBatchBody, tenant: str, key: str, most_bytes: int
) -> Batch:
    """Write the requests as lines of a file and begin their batch. Raise ApiError."""
    upload = files.begin(tenant)
    try:
        for line in _lines(body, most_bytes):
            upload.write(line)
        upload.close()
        file = files.commit(tenant, upload, "messages.jsonl", "batch")
    finally:
        upload.discard()
    now = int(time.time())
    order = BatchOrder(
        id=new_id("batch_"), tenant=tenant, key=key, endpoint=MESSAGES, input_file_id=file.id,
        completion_window=f"{WINDOW_H}h", created_at=now, expires_at=now + 3600 * WINDOW_H,
        requests=len(body.requests),
    )  # fmt: skip
    try:
        return batches.create(order)
    except BaseException:
        files.delete(tenant, file.id)
        raise


def _lines(body: MessageBatchBody, most_bytes: int) -> Iterator[bytes]:
    """Yield the line of each request. Raise ApiError for what would make the whole batch fail."""
    known_ids: set[str] = set()
    for index, each in enumerate(body.requests):
        place = f"requests[{index}]"
        if each.custom_id in known_ids:
            raise invalid("requests", f"{place}.custom_id {each.custom_id!r} occurs twice; make it unique")
        known_ids.add(each.custom_id)
        for name, neutral in (("stream", False), ("background", False), ("priority", "low")):
            if (value := each.params.get(name)) not in (None, neutral):
                raise invalid("requests", f"{place}.params.{name} is {quote(value)}; leave it out in a batch")
        line = {"custom_id": each.custom_id, "method": "POST", "url": MESSAGES, "body": each.params}
        if len(text := orjson.dumps(line)) > most_bytes:
            raise ApiError(413, f"{place} has {len(text)} bytes as a line, at most {most_bytes}; send a shorter one")
        yield text + b"\n"


def _find(batches: BatchStore, tenant: str, batch_id: str) -> Batch:
    """Return a batch of messages. Raise ApiError(404)."""
    batch = batches.get(tenant, batch_id)
    if batch is None or batch.order.endpoint != MESSAGES:
        text = f"batch {batch_id[:80]!r} not found; GET {PATH} lists those of the key's tenant"
        raise ApiError(404, text, param="batch_id", code="batch_not_found")
    return batch


def _find_body(batches: BatchStore, tenant: str, batch_id: str) -> dict[str, Any]:
    return _body(_find(batches, tenant, batch_id))


def _page(batches: BatchStore, tenant: str, limit: int, after_id: str | None, before_id: str | None) -> dict[str, Any]:
    """Return a page of the list. Raise ApiError(400)."""
    if after_id and before_id:
        raise invalid("before_id", "before_id and after_id exclude each other; send one of them")
    read = (batches.get(tenant, batch_id) for batch_id in reversed(batches.ids(tenant)))
    batches_of_api = [batch for batch in read if batch is not None and batch.order.endpoint == MESSAGES]
    begin, end = 0, limit
    if name := after_id or before_id:
        field = "after_id" if after_id else "before_id"
        at = next((index for index, batch in enumerate(batches_of_api) if batch.order.id == name), None)
        if at is None:
            raise invalid(field, f"{field} {quote(name)} is not in this list; leave it out")
        begin, end = (at + 1, at + 1 + limit) if after_id else (max(0, at - limit), at)
    page = [_body(batch) for batch in batches_of_api[begin:end]]
    return {
        "data": page,
        "has_more": begin > 0 if before_id else end < len(batches_of_api),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _body(batch: Batch) -> dict[str, Any]:
    """Return the object of Anthropic's API."""
    order, state = batch.order, batch.state
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    has_ended = batch.status in ENDED
    if has_ended:
        counts |= {"succeeded": state.completed, "errored": state.failed - state.expired, "expired": state.expired}
        counts[_REST.get(batch.status, "errored")] += order.requests - state.completed - state.failed
    else:
        counts["processing"] = order.requests
    status = "canceling" if batch.cancelling_at is not None else "in_progress"
    return {
        "id": order.id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else status,
        "request_counts": counts,
        "created_at": _time(order.created_at),
        "expires_at": _time(order.expires_at),
        "ended_at": _time(state.times.get(f"{state.status}_at")) if has_ended else None,
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{PATH}/{order.id}/results" if has_ended else None,
    }


_REST = {"cancelled": "canceled", "expired": "expired"}
"""Status of a batch -> what its requests without an answer are; else errored."""


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _open(files: FileStore, batch: Batch, ids: list[str]) -> list[BinaryIO]:
    """Open files of a batch; those that are deleted or have expired are left out."""
    open_files = []
    for file_id in ids:
        try:
            open_files.append(files.open(batch.order.tenant, file_id)[1])
        except ApiError as error:
            if error.code != "file_not_found":
                raise
    return open_files


def _results(batches: BatchStore, files: FileStore, tenant: str, batch_id: str) -> Iterator[bytes]:
    """Return the lines of the results. Raise ApiError(404, 409)."""
    batch = _find(batches, tenant, batch_id)
    if batch.status not in ENDED:
        text = f"batch {batch_id}: it has no results yet; ask again once its processing_status is ended"
        raise ApiError(409, text, param="batch_id", code="batch_not_ended")
    ids = [file_id for file_id in (batch.state.output_file_id, batch.state.error_file_id) if file_id]
    return _result_lines(batch, _open(files, batch, ids), _open(files, batch, [batch.order.input_file_id]))


def _result_lines(batch: Batch, outputs: list[BinaryIO], inputs: list[BinaryIO]) -> Iterator[bytes]:
    """Yield the answers of a batch, then one line for each request without one."""
    known_ids: set[str] = set()
    for file in outputs:
        with file:
            for text in file:
                row = orjson.loads(text)
                known_ids.add(row["custom_id"])
                yield orjson.dumps({"custom_id": row["custom_id"], "result": _result(row)}) + b"\n"
    rest: dict[str, Any] = {"type": _REST.get(batch.status, "errored")}
    if rest["type"] == "errored":
        message = (
            batch.state.errors[0]["message"] if batch.state.errors else "this request has no answer; send it again"
        )
        rest = _error_result(message)
    for file in inputs:
        with file:
            for text in file:
                if (custom_id := orjson.loads(text)["custom_id"]) not in known_ids:
                    yield orjson.dumps({"custom_id": custom_id, "result": rest}) + b"\n"


def _result(row: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request from its output line (shared/batch_lines.py)."""
    response, error = row["response"], row["error"]
    if response is None:
        return {"type": "expired"} if error["code"] == "batch_expired" else _error_result(error["message"])
    if response["status_code"] < 400:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"] | {"request_id": response["request_id"] or None}}


def _error_result(message: str) -> dict[str, Any]:
    return {"type": "errored", "error": ApiError(500, message).messages_body() | {"request_id": None}}


async def _pieces(files: FileStore, lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await files.in_thread(lambda: b"".join(islice(lines, LINES_AT_ONCE))):
        yield piece
