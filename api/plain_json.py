"""What JSON can say and no job can hold: text that is none, values in values without end, and too many of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from pydantic import BaseModel, model_validator

from tasks.codes import CarpoolError

#: Twice what a JSON schema may have; readers that recurse have their limits far above.
MAX_DEPTH: Final = 128
#: Each value that does not fit is an error of its own to pydantic: a small body of millions would hold up everybody.
MAX_VALUES: Final = 100_000


def check_plain(body: Any) -> None:
    """Refuse lone surrogates, which no UTF-8 can hold and pydantic lets through, and what is too deep or too much.

    Raises:
        CarpoolError: "invalid_request", with the path of the value as its param.
    """
    # level by level: the recursion of a deep body would not end well
    level, num_values = [body], 0
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        values: Iterable[Any]
        for container in level:
            if isinstance(container, dict):
                for name in container:
                    if not name.isascii():
                        _check_text(body, name)
                values = container.values()
            elif isinstance(container, list):
                values = container
            else:
                return  # the body is no object, which is said elsewhere
            num_values += len(container)
            if num_values > MAX_VALUES:
                raise CarpoolError("invalid_request", f"the body holds more than {MAX_VALUES} values. Send fewer")
            for value in values:
                if isinstance(value, str):
                    if not value.isascii():
                        _check_text(body, value)
                elif isinstance(value, dict | list):
                    deeper.append(value)
        if not deeper:
            return
        level = deeper
    top = _path_to(body, level[0]).partition(".")[0].partition("[")[0]
    raise CarpoolError("invalid_request", f"{top}: nested deeper than {MAX_DEPTH} levels. Send it flatter", param=top)


def _check_text(body: Any, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        path = _path_to(body, text)
        raise CarpoolError(
            "invalid_request",
            f"{path}: {text[error.start]!r} at character {error.start} is half a surrogate pair, which is no text. "
            "Send whole characters",
            param=path,
        ) from None


def _path_to(body: Any, wanted: Any) -> str:
    """Where a value, or the name of one, stands in a body."""
    waiting: list[tuple[str, Any]] = [("", body)]
    while waiting:
        path, value = waiting.pop()
        if value is wanted:
            return path
        for inner_path, name, inner in _inner(path, value):
            if name is wanted:
                return path or "the body"
            waiting.append((inner_path, inner))
    raise LookupError("the value is not in the body")


def _inner(path: str, value: Any) -> Iterator[tuple[str, str | None, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (f"{path}.{name}" if path else name), name, inner
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield f"{path}[{index}]", None, inner


class PlainJson(BaseModel):
    """Base of all bodies: looks at them before any field is read."""

    @model_validator(mode="before")
    @classmethod
    def _holds_text_alone(cls, value: Any) -> Any:
        check_plain(value)
        return value
