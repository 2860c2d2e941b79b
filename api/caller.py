"""Who sends a request, and what it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fastapi import Request

from api.rate_headers import rate_headers
from tasks import keys
from tasks.api_keys import ApiKey
from tasks.codes import CarpoolError
from tasks.ledger_types import KeyLimits, OverLimit, Spent
from tasks.priority import NORMAL, Priority, priority_number

_RETRY_NEVER_S: Final = 60


@dataclass(slots=True)
class Caller:
    """One request's, or a batch's.

    Attributes:
        owner: whose everything is that it makes, and who sees it: an API key's id, or "all" where there are no keys.
        key: None where there are none.
        spent: what the request has left of its key's minute, once it was counted.
    """

    owner: str = keys.NO_KEY
    key: ApiKey | None = None
    spent: Spent | None = None

    @property
    def limits(self) -> KeyLimits | None:
        """What is counted; None where nothing is limited."""
        return None if self.key is None else self.key.limits

    def priority(self, asked: Priority | None, default: int = NORMAL) -> int:
        """The priority of a job. A default gives way to the key's ceiling.

        Raises:
            CarpoolError: "priority_not_allowed" for one that was asked for and is above it.
        """
        number = priority_number(asked, default)
        ceiling = 0 if self.key is None else self.key.priority_ceiling
        if number >= ceiling:
            return number
        if asked is not None:
            raise CarpoolError(
                "priority_not_allowed",
                f"priority: this API key may ask for {ceiling} to 9 (0 comes first), and it is {asked!r}. Leave it "
                "out, or ask for less",
                param="priority",
            )
        return ceiling


def caller_of(request: Request) -> Caller:
    """The caller of a request. Raises TypeError where none was let in: then nothing may be answered."""
    caller = request.scope.get("state", {}).get("caller")
    if not isinstance(caller, Caller):
        raise TypeError("the request has no caller")
    return caller


def over_limit(over: OverLimit) -> CarpoolError:
    """The error of a request that its key's limits do not allow."""
    never = over.wait_ms < 0
    retry_after_s = _RETRY_NEVER_S if never else max(1, -(-over.wait_ms // 1000))
    if over.what == "jobs":
        message = f"this API key may have {over.limit} jobs at once: {over.used} have not ended, and this asks for "
        advice = "Ask for fewer in one request" if never else f"Try again in {retry_after_s} s, or cancel one"
        return CarpoolError(
            "too_many_jobs", f"{message}{over.asked}. {advice}", retry_after_s=retry_after_s, is_final=never
        )
    message = f"this API key may use {over.limit} {over.what} a minute: {over.used} are used, and this asks for "
    advice = "Lower max_tokens, or send less" if never else f"Try again in {retry_after_s} s"
    return CarpoolError(
        "rate_limit_exceeded", f"{message}{over.asked}. {advice}", retry_after_s=retry_after_s, is_final=never
    )


def headers_of_minute(spent: Spent) -> Mapping[str, str]:
    """What is left of a key's minute, as OpenAI's clients read it."""
    found: dict[str, str] = {}
    for what, allowance in (("requests", spent.requests), ("tokens", spent.tokens)):
        if allowance is not None:
            found.update(rate_headers(what, allowance.limit, allowance.remaining, allowance.reset_ms))
    return found
