"""Request headers in the OpenAPI description: endpoints read them from the request itself."""

from __future__ import annotations

from typing import Any, Final


def _header(name: str, description: str, **schema: Any) -> dict[str, Any]:
    parameter = {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": {"type": "string", **schema},
    }
    return {"parameters": [parameter]}


#: For `openapi_extra` of an endpoint that makes something once only.
IDEMPOTENCY_KEY: Final = _header(
    "Idempotency-Key",
    "1 to 255 printable ASCII characters of your choice. The same request sent again with it gets what the first one "
    "made: the same job, its wait, its stream. Another body with it gets 409. Remembered for CARPOOL_IDEMPOTENCY_S at "
    "least.",
    minLength=1,
    maxLength=255,
    pattern="^[\\x21-\\x7e]{1,255}$",
)
#: For a stream of `/jobs/{id}/stream`.
LAST_EVENT_ID: Final = _header(
    "Last-Event-ID",
    "Id of the last event that you have; browsers' EventSource sends it by itself. It wins over `starting_after`.",
    pattern="^[0-9]{1,9}$",
)
