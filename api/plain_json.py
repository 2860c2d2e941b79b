"""What JSON can say and no job can hold: text that is none, and values in values without end."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, model_validator

from tasks.codes import CarpoolError

#: Twice what a JSON schema may have; readers that recurse have their limits far above.
MAX_DEPTH: Final = 128


def check_plain(value: Any) -> None:
    """Refuse lone surrogates, which no UTF-8 can hold and pydantic lets through, and what is nested too deeply.

    Raises:
        CarpoolError: "invalid_request", with the path of the value as its param.
    """
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    while waiting:
        path, item, depth = waiting.pop()
        if isinstance(item, str):
            _check_text(path, item)
        elif isinstance(item, dict | list) and depth >= MAX_DEPTH:
            top = path.partition(".")[0].partition("[")[0]
            raise CarpoolError(
                "invalid_request", f"{top}: nested deeper than {MAX_DEPTH} levels. Send it flatter", param=top
            )
        elif isinstance(item, list):
            waiting.extend((f"{path}[{index}]", inner, depth + 1) for index, inner in enumerate(item))
        elif isinstance(item, dict):
            for name, inner in item.items():
                _check_text(path or "the body", name)
                waiting.append((f"{path}.{name}" if path else name, inner, depth + 1))


def _check_text(path: str, text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CarpoolError(
            "invalid_request",
            f"{path}: {text[error.start]!r} at character {error.start} is half a surrogate pair, which is no text. "
            "Send whole characters",
            param=path,
        ) from None


class PlainJson(BaseModel):
    """Base of all bodies: looks at them before any field is read."""

    @model_validator(mode="before")
    @classmethod
    def _holds_text_alone(cls, value: Any) -> Any:
        check_plain(value)
        return value
