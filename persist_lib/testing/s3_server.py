"""Moto's S3 over HTTP: `python s3_server.py PORT ADDRESS`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from moto.core.responses import ActionResult
from moto.s3.exceptions import MalformedXML
from moto.s3.models import S3Backend
from moto.s3.responses import S3Response
from moto.server import main

PAGE = 1000
"""The most keys that S3 lists in one request, and the most that it deletes in one request."""


def uploads_in_pages(response: S3Response) -> Any:
    """Answer a listing of unfinished uploads in pages, as S3 does; moto would return all of them."""
    asked = {name: values[0] for name, values in response.querystring.items() if values}
    prefix, limit = asked.get("prefix", ""), min(int(asked.get("max-uploads", PAGE)), PAGE)
    after = asked.get("key-marker", ""), asked.get("upload-id-marker", "")
    uploads = response.backend.list_multipart_uploads(response.bucket_name).values()
    found = sorted((upload.key_name, upload.id) for upload in uploads if upload.key_name.startswith(prefix))
    # A key alone as the marker passes all uploads of that key.
    rest = [one for one in found if (one > after if after[1] else one[0] > after[0])]
    page, is_truncated = rest[:limit], len(rest) > limit
    last = page[-1] if is_truncated else ("", "")
    answer = {
        "Bucket": response.bucket_name, "KeyMarker": after[0], "UploadIdMarker": after[1], "NextKeyMarker": last[0],
        "NextUploadIdMarker": last[1], "MaxUploads": limit, "IsTruncated": is_truncated,
        "Uploads": [{"Key": key, "UploadId": id_} for key, id_ in page],
    }  # fmt: skip
    response.data["Action"] = "ListMultipartUploads"
    return response.serialized(ActionResult(answer))


def refusing_too_many(delete_objects: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to delete more keys at once than S3 does; moto would delete any number."""

    def delete_some(backend: S3Backend, bucket: str, objects: list[Any], *bypass: bool) -> Any:
        if len(objects) > PAGE:
            raise MalformedXML
        return delete_objects(backend, bucket, objects, *bypass)

    return delete_some


if __name__ == "__main__":
    S3Backend.delete_objects = refusing_too_many(S3Backend.delete_objects)  # type: ignore[method-assign]
    S3Response.list_multipart_uploads = uploads_in_pages  # type: ignore[assignment, method-assign]
    # Moto looks whether a key exists and then stores it, without a lock, and lists keys while others are stored. Where
    # threads are not interrupted in between, its conditional PUT is as atomic as S3's, also on a busy machine.
    sys.setswitchinterval(1.0)
    main(["-H", sys.argv[2], "-p", sys.argv[1]])
