"""The headers that say how much more may come, by the names that OpenAI's clients know."""

from __future__ import annotations

from typing import Final

#: All that an answer may carry, for browsers to be shown.
RATE_HEADERS: Final = tuple(
    f"x-ratelimit-{part}-{what}" for what in ("requests", "tokens") for part in ("limit", "remaining", "reset")
)


def rate_headers(what: str, limit: int, remaining: int, reset_ms: int) -> dict[str, str]:
    """How many of `what` ("requests" or "tokens") may come, and in how many milliseconds all of them may again."""
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(remaining),
        f"x-ratelimit-reset-{what}": _duration(reset_ms),
    }


def _duration(ms: int) -> str:
    """A time as OpenAI's headers have it: 0s, 17ms, 8s, 6m0s, 1h2m3s; whole seconds rounded up."""
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, seconds = divmod(-(-ms // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
