"""Serve `/v1/files`: the inputs of batches, as clients upload them, and the outputs."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, BinaryIO, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from services.gateway.auth import Caller
from services.gateway.batches.files import FileStore, StoredFile, Upload
from services.gateway.errors import RETRY, ApiError, invalid, unavailable
from services.gateway.gateway import Gateway
from services.gateway.http.multipart import MultipartReader, Part, boundary_of
from services.gateway.openai.answers import json_response, list_page
from services.gateway.openai.document import FOUND, errors
from shared.messages import quote

PATH = "/v1/files"
PURPOSE = "batch"
FORM_BYTES = 64 << 10
"""Of a form without its file."""
MAX_UPLOADS = 8
"""Of a gateway process at a time; each may take `file_bytes` of the disk before it is refused. One tenant, where there
are keys of others, may have half.
"""
MAX_FIELD_BYTES = 1024
MAX_FILES = 10_000
"""Of one page of the list."""
PIECE_BYTES = 256 << 10
LEAST_KEPT_S, MAX_KEPT_S = 3600, 2_592_000
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
Order = Annotated[Literal["asc", "desc"], Query()]
After = Annotated[str, Query(max_length=128)]

_FILE = {"type": "string", "format": "binary", "description": "lines of requests, JSON"}
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": _FILE,
                        "purpose": {"type": "string", "enum": [PURPOSE]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_KEPT_S, "maximum": MAX_KEPT_S},
                    },
                }
            }
        },
    }
}
_CONTENT = {
    "description": "the file as it was uploaded or written",
    "content": {"application/jsonl": {"schema": {"type": "string", "format": "binary"}}},
}


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()
    files = gateway.batches.files
    uploads: Counter[str] = Counter()  # by tenant

    @routes.post(PATH, responses={200: FOUND, **errors(404, 413, 415, 429, 503)}, openapi_extra=_UPLOAD)
    async def upload_file(request: Request) -> Response:
        """Keep a file of requests for a batch."""
        reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
        caller: Caller = request.state.caller
        tenant_uploads = MAX_UPLOADS // 2 if caller.has_others else MAX_UPLOADS
        if uploads[caller.tenant] >= tenant_uploads or uploads.total() >= MAX_UPLOADS:
            text = f"files: {MAX_UPLOADS} uploads at a time, {tenant_uploads} of one tenant; {RETRY}"
            raise ApiError(429, text, code="too_many_uploads", retry_after_s=1)
        uploads[caller.tenant] += 1
        try:
            return json_response((await _upload(request, reader, files)).body())
        except OSError as error:
            text = f"files: the disk takes none: {error.strerror}; {RETRY}"
            raise unavailable(text, "files_unavailable", 60) from error
        finally:
            uploads[caller.tenant] -= 1
            if not uploads[caller.tenant]:
                del uploads[caller.tenant]

    @routes.get(PATH, responses={200: FOUND, **errors(404)})
    async def list_files(
        request: Request,
        purpose: Annotated[str, Query(max_length=64)] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_FILES)] = MAX_FILES,
        order: Order = "desc",
        after: After = "",
    ) -> Response:
        """List the files of the caller, a page at a time."""
        stored = await files.in_thread(files.of_tenant, request.state.tenant)
        bodies = [file.body() for file in stored if not purpose or file.purpose == purpose]
        return json_response(list_page(bodies, limit, after, newest_first=order == "desc"))

    @routes.get("/v1/files/{file_id}", responses={200: FOUND, **errors(404)})
    async def file(file_id: str, request: Request) -> Response:
        """Return what is known of a file."""
        return json_response((await files.in_thread(files.find, request.state.tenant, file_id)).body())

    @routes.get("/v1/files/{file_id}/content", responses={200: _CONTENT, **errors(404)})
    async def file_content(file_id: str, request: Request) -> Response:
        """Return the content of a file."""
        file, content = await files.in_thread(files.open, request.state.tenant, file_id)
        name = f'attachment; filename="{file.id}.jsonl"'
        headers = {"content-length": str(file.bytes), "content-disposition": name}
        return StreamingResponse(_pieces(files, content), headers=headers, media_type="application/jsonl")

    @routes.delete("/v1/files/{file_id}", responses={200: FOUND, **errors(404)})
    async def delete_file(file_id: str, request: Request) -> Response:
        """Delete a file; a batch that has it as its input goes on."""
        await files.in_thread(files.delete, request.state.tenant, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    return routes


@dataclass(slots=True)
class _Form:
    """What has come of an upload."""

    fields: dict[str, bytearray] = field(default_factory=dict)
    filename: str = ""
    has_file: bool = False
    in_file: bool = False
    field_name: str = ""

    def begin(self, part: Part) -> None:
        """Take the beginning of a part. Raise ApiError(400)."""
        self.in_file = part.name == "file"
        if self.in_file:
            if self.has_file:
                raise invalid("file", "file was sent twice; send one file at a time")
            self.has_file, self.filename = True, part.filename or "file.jsonl"
            return
        if part.name not in FIELDS:
            name = part.name[:80]
            raise invalid(name, f"Unrecognized request argument supplied: {name}", "unknown_parameter")
        if part.name in self.fields:
            raise invalid(part.name, f"{part.name} was sent twice; send it once")
        self.field_name = part.name
        self.fields[part.name] = bytearray()

    def add(self, data: bytes) -> None:
        """Take content of a field. Raise ApiError(400)."""
        value = self.fields[self.field_name]
        value += data
        if len(value) > MAX_FIELD_BYTES:
            raise invalid(self.field_name, f"{self.field_name} may have {MAX_FIELD_BYTES} bytes; got more")

    def text(self, name: str) -> str | None:
        """Return a field; None where it was not sent."""
        value = self.fields.get(name)
        return None if value is None else value.decode("utf-8", "replace")


async def _upload(request: Request, reader: MultipartReader, files: FileStore) -> StoredFile:
    """Write the file of a request to the disk as it comes. Raise ApiError."""
    tenant, form = request.state.tenant, _Form()
    upload = await files.in_thread(files.begin, tenant)
    try:
        async for data in request.stream():
            for piece in reader.feed(data):
                await _take(piece, form, files, upload)
        if not reader.is_whole:
            raise invalid(
                None,
                "the body is no multipart/form-data: it ends within a part; end it with the boundary",
                "invalid_multipart",
            )
        if not form.has_file:
            raise invalid("file", "you must provide the parameter file", "missing_required_parameter")
        kept_s = _check(form)

        def keep() -> StoredFile:
            upload.close()
            return files.commit(tenant, upload, form.filename, PURPOSE, kept_s)

        return await files.in_thread(keep)
    finally:
        await asyncio.shield(files.in_thread(upload.discard))  # also for a client that has left


async def _take(piece: Part | bytes, form: _Form, files: FileStore, upload: Upload) -> None:
    if isinstance(piece, Part):
        form.begin(piece)
    elif form.in_file:
        await files.in_thread(upload.write, piece)
    else:
        form.add(piece)


def _check(form: _Form) -> int | None:
    """Return the time for which the file is to be kept, None for the usual one. Raise ApiError(400)."""
    purpose = form.text("purpose")
    if purpose is None:
        raise invalid("purpose", "you must provide the parameter purpose", "missing_required_parameter")
    if purpose != PURPOSE:
        raise invalid("purpose", f"purpose must be {PURPOSE!r}, the only one here; got {quote(purpose)}")
    anchor, seconds = form.text("expires_after[anchor]"), form.text("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("expires_after", f"expires_after.anchor must be 'created_at'; got {quote(anchor)}")
    if not (re.fullmatch(r"[0-9]{1,7}", seconds or "") and LEAST_KEPT_S <= int(seconds or "") <= MAX_KEPT_S):
        text = f"expires_after.seconds must be {LEAST_KEPT_S} to {MAX_KEPT_S}; got {quote(seconds)}"
        raise invalid("expires_after", text)
    return int(seconds or "")


async def _pieces(files: FileStore, content: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while piece := await files.in_thread(content.read, PIECE_BYTES):
            yield piece
    finally:
        files.close_later(content)
