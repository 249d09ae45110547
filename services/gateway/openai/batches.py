"""Serve `/v1/batches`: many requests of a file, run in class low where there is room."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from services.gateway.batches.files import new_id
from services.gateway.batches.records import BatchOrder, BatchStore
from services.gateway.errors import ApiError, invalid
from services.gateway.gateway import Gateway
from services.gateway.openai.answers import json_response, list_page
from services.gateway.openai.bodies import Body, Metadata, read_body
from services.gateway.openai.document import FOUND, body_of, errors
from shared.batch_lines import Url

MAX_BATCHES = 100
"""Of one page of the list."""
MAX_HOURS = 720


class ExpiresAfter(Body):
    """`output_expires_after`: when the output files are deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class BatchBody(Body):
    """`POST /v1/batches`."""

    input_file_id: str = Field(max_length=64, description="a file that was uploaded with purpose batch")
    endpoint: Url
    completion_window: str = Field(pattern=r"^[1-9][0-9]{0,2}h$", description="24h, or another time up to 720h")
    metadata: Metadata | None = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()
    batches, files = gateway.batches.batches, gateway.batches.files

    @routes.post(
        "/v1/batches", responses={200: FOUND, **errors(404, 413, 415, 429, 503)}, openapi_extra=body_of(BatchBody)
    )
    async def create_batch(request: Request) -> Response:
        """Begin to answer the lines of a file."""
        order = _order(await read_body(request, BatchBody), request)
        try:
            batch = await files.in_thread(batches.create, order)
        except ApiError as error:
            if error.code == "file_not_found":
                raise invalid("input_file_id", f"input_file_id: {error.message}; upload it first") from None
            raise
        gateway.batches.wake()
        return json_response(batch.body())

    @routes.get("/v1/batches", responses={200: FOUND, **errors(404)})
    async def list_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_BATCHES)] = 20,
        after: Annotated[str, Query(max_length=128)] = "",
    ) -> Response:
        """List the batches of the caller, the newest first, a page at a time."""
        return json_response(await files.in_thread(_page, batches, request.state.tenant, limit, after))

    @routes.get("/v1/batches/{batch_id}", responses={200: FOUND, **errors(404)})
    async def batch(batch_id: str, request: Request) -> Response:
        """Return a batch."""
        return json_response((await files.in_thread(batches.find, request.state.tenant, batch_id)).body())

    @routes.post("/v1/batches/{batch_id}/cancel", responses={200: FOUND, **errors(404, 409)})
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        """Cancel a batch; what was answered until then becomes its output."""
        return json_response((await files.in_thread(batches.cancel, request.state.tenant, batch_id)).body())

    return routes


def _page(batches: BatchStore, tenant: str, limit: int, after: str) -> dict[str, Any]:
    """Return a page of the list; blocks, and reads the records of that page alone. Raise ApiError(400)."""
    page = list_page([{"id": batch_id} for batch_id in batches.ids(tenant)], limit, after, newest_first=True)
    batches_of_page = (batches.get(tenant, item["id"]) for item in page["data"])
    return page | {"data": [batch.body() for batch in batches_of_page if batch is not None]}


def _order(body: BatchBody, request: Request) -> BatchOrder:
    """Return what is kept of a body. Raise ApiError(400)."""
    hours = int(body.completion_window.removesuffix("h"))
    if hours > MAX_HOURS:
        raise invalid("completion_window", f"completion_window may be up to {MAX_HOURS}h; got {body.completion_window}")
    caller, now = request.state.caller, int(time.time())
    fields: dict[str, Any] = {"output_kept_s": body.output_expires_after.seconds} if body.output_expires_after else {}
    return BatchOrder(
        id=new_id("batch_"),
        tenant=caller.tenant,
        key=caller.bucket,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + 3600 * hours,
        metadata=body.metadata,
        **fields,
    )
