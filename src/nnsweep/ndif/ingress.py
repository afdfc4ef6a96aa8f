"""The NDIF API, with every request signed in as the same kind of key.

Runs inside the server's environment, where nnsweep is not installed: a copy of it lies on the
API's path, so it imports nothing of ours.

NDIF decides at this point, from the tags of the caller's key, whether a request may run without
the sandbox. Without a database of keys it calls everybody trusted. Here the server's own setting
decides, so that everything behind it (model loading included) goes the way it goes on the public
service. A key that a client sends is dropped before anything can log it.
"""

import json
import os
import time
from pathlib import Path

from fastapi import Form, Header
from ndif.common.schema.request import BackendRequestModel
from ndif.services.api.app import app
from ndif.services.api.auth import validate_request

__all__ = ["app"]

_TRUSTED = os.environ["NNSWEEP_NDIF_TRUSTED"] == "1"
_RECEIVED = Path(os.environ["NNSWEEP_NDIF_RECEIVED"])


async def sign_in(
    data: str = Form(...),
    api_key: str | None = Header(default=None, alias="ndif-api-key"),
) -> BackendRequestModel:
    """Let NDIF check the envelope, then say whose request it is and note it down.

    Args:
        data: the request's envelope as JSON.
        api_key: ignored; named so that the API's description stays as it is.

    Returns:
        The request as the queue gets it.
    """
    request = await validate_request(data, None)
    request.api_key = None
    request.trusted = _TRUSTED
    _note(request)
    return request


def _note(request: BackendRequestModel) -> None:
    line = {
        "time": time.time(),
        "id": request.id,
        "blocking": bool(request.session_id),
        "model_key": request.model_key,
    }
    # One short write in append mode is whole even if several API workers share the file.
    with _RECEIVED.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


app.dependency_overrides[validate_request] = sign_in
