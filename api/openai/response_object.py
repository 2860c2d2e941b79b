"""The response object: a job's record, as OpenAI's clients know it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.openai.chunks import cached_tokens
from api.openai.message import MessageFold
from api.openai.response_output import OutputFold
from api.openai.serving import recorded
from api.service import Service
from tasks import keys
from tasks.chat import FunctionCall, Message, ToolCall
from tasks.codes import CODES, CarpoolError

PATH: Final = "/v1/responses"
PREFIX: Final = "resp_"
_STATUS: Final = {"queued": "queued", "running": "in_progress", "cancelled": "cancelled"}


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as the ledger holds it.

    Attributes:
        view: the object of `GET /jobs/{id}`.
        request: what the object repeats of its request.
        turns: the conversation up to this answer, without the instructions.
    """

    view: Mapping[str, Any]
    request: Mapping[str, Any]
    turns: Sequence[Message]

    @property
    def uses_tools(self) -> bool:
        return bool(self.request["tools"]) and self.request["tool_choice"] != "none"

    def object(self) -> dict[str, Any]:
        """The response as it is now."""
        view = self.view
        ended = view["status"] not in ("queued", "running")
        fold = OutputFold(view["id"], self.uses_tools)
        fold.feed(view["text"])
        if ended:
            fold.finish("", complete=view["status"] == "succeeded" and view["finish_reason"] == "stop")
        return {
            **self.begun(),
            **(
                ending(view["status"], view["finish_reason"], view["usage"], view["error"])
                if ended
                else {"status": _STATUS[view["status"]]}
            ),
            "output": fold.items,
        }

    def begun(self) -> dict[str, Any]:
        """The response before its first token: what the first events of its stream hold, whenever they are sent."""
        return {
            "id": self.view["id"],
            "object": "response",
            "created_at": int(self.view["created_at"]),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self.view["model"],
            "output": [],
            "usage": None,
            "metadata": self.view["metadata"] or {},
            **self.request,
        }

    def answered(self) -> list[Message]:
        """The conversation with this answer, for the next turn."""
        fold = MessageFold(self.view["id"], self.uses_tools)
        fold.feed(self.view["text"])
        fold.finish()
        calls = [
            ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments)) for call in fold.calls
        ]
        content = fold.content if fold.content or not calls else None
        return [*self.turns, Message(role="assistant", content=content, tool_calls=calls or None)]


def ending(
    status: str, finish_reason: str | None, usage: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the end of its job makes of a response."""
    counts = usage or {}
    found: dict[str, Any] = {
        "status": _STATUS.get(status, "failed"),
        "usage": {
            "input_tokens": counts.get("prompt_tokens") or 0,
            "input_tokens_details": {"cached_tokens": cached_tokens(counts), "cache_write_tokens": 0},
            "output_tokens": counts.get("completion_tokens") or 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts.get("total_tokens") or counts.get("completion_tokens") or 0,
        },
    }
    if status == "succeeded" and finish_reason == "length":
        found |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    elif status == "succeeded":
        found["status"] = "completed"
    elif status != "cancelled":
        code = str((error or {}).get("code", "internal_error"))
        known = CODES.get(code)
        # OpenAI's clients know few codes here, so ours stands in the message
        found["error"] = {
            "code": "invalid_prompt" if known is not None and known.status < 500 else "server_error",
            "message": f"{code}: {(error or {}).get('message')}",
        }
    return found


def kept_request(echo: Mapping[str, Any], store: bool | None) -> str:
    """What the record keeps, for `load` to read."""
    return recorded(PATH, store, response=echo)


async def load(service: Service, id: str, owner: str) -> Stored:
    """A response by its id; what is not the owner's is not there, "" sees all.

    Raises:
        CarpoolError: "job_not_found", also for jobs that other endpoints made.
    """
    view = (await service.ledger.run(service.calls.view([id], owner)))[0] if id.startswith(PREFIX) else None
    found = await service.client.hmget(keys.record(id), ["request", "input"]) if view is not None else []
    if view is None or not all(found):
        raise CarpoolError(
            "job_not_found", f"there is no response {id[:128]!r}: it never was, was deleted, or is kept no longer"
        )
    request = json.loads(str(found[0]))["response"]
    turns = [Message.from_record(turn) for turn in json.loads(str(found[1]))["messages"]]
    return Stored(view, request, turns[1:] if request["instructions"] is not None else turns)
