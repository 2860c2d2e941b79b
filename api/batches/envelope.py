"""A line of a batch's input: `{custom_id, method, url, body}`, checked before anything of the batch runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from api.batches.lines import Line
from tasks.codes import CarpoolError

MAX_REQUESTS: Final = 50_000
MAX_CUSTOM_ID: Final = 512
#: More would not help whoever reads them.
MAX_ERRORS: Final = 100
_FIELDS: Final = ("custom_id", "method", "url", "body")
_SHOWN: Final = 80


class LineError(Exception):
    """What is wrong with a line, as `errors.data` of a batch lists it."""

    def __init__(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        super().__init__(message)
        self.body = {"code": code, "message": message, "line": line, "param": param}


@dataclass(frozen=True, slots=True)
class Envelope:
    """A request of a batch."""

    custom_id: str
    body: dict[str, Any]


def parse_line(line: Line, endpoint: str, max_bytes: int) -> Envelope:
    """Raises LineError."""

    def refuse(code: str, message: str, param: str | None = None) -> NoReturn:
        raise LineError(code, message, line.number, param)

    if line.data is None:
        refuse(
            "line_too_long", f"the line is longer than {max_bytes} bytes (CARPOOL_MAX_BODY_BYTES). Send a shorter one"
        )
    try:
        found = json.loads(line.data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) or "it is nested too deeply"
        refuse("invalid_json_line", f"the line is no JSON: {reason[:200]}. Each line is one JSON object")
    if not isinstance(found, dict):
        refuse("invalid_json_line", "the line is no JSON object")
    for name in found:
        if name not in _FIELDS:
            refuse(
                "unsupported_field",
                f"the field {name[:_SHOWN]!r} is not supported in a line. Leave it out",
                name[:_SHOWN],
            )
    for name in _FIELDS:
        if name not in found:
            refuse("missing_required_parameter", f"{name} is missing", name)
    custom_id = found["custom_id"]
    if not (isinstance(custom_id, str) and 1 <= len(custom_id) <= MAX_CUSTOM_ID and _is_text(custom_id)):
        refuse(
            "invalid_custom_id",
            f"custom_id: it has to be a text of 1 to {MAX_CUSTOM_ID} characters, but it is {custom_id!r:.80}",
            "custom_id",
        )
    if found["method"] != "POST":
        refuse("invalid_method", f"method: POST alone is possible, but it is {found['method']!r:.80}", "method")
    if found["url"] != endpoint:
        refuse("invalid_url", f"url: the batch is for {endpoint}, but it is {found['url']!r:.80}", "url")
    if not isinstance(found["body"], dict):
        refuse("invalid_body", f"body: it has to be a JSON object, but it is {found['body']!r:.80}", "body")
    return Envelope(custom_id, found["body"])


class Validation:
    """Looks at every line of an input, and keeps a hash of each custom_id alone.

    Attributes:
        num_requests: lines that hold a request so far.
        errors: what is wrong, as `errors.data` lists it.
    """

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self.num_requests = 0
        self.errors: list[dict[str, Any]] = []
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._seen: set[bytes] = set()

    @property
    def is_hopeless(self) -> bool:
        """Nothing more needs to be looked at."""
        return len(self.errors) >= MAX_ERRORS or self.num_requests > MAX_REQUESTS

    def add(self, line: Line) -> None:
        if line.is_blank:
            return
        self.num_requests += 1
        try:
            if self.num_requests > MAX_REQUESTS:
                raise LineError(
                    "too_many_requests",
                    f"a batch takes {MAX_REQUESTS} requests, and this one has more. Split it",
                    line.number,
                )
            custom_id = parse_line(line, self._endpoint, self._max_bytes).custom_id
            digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
            if digest in self._seen:
                raise LineError(
                    "duplicate_custom_id",
                    f"another line has the custom_id {custom_id!r:.80} too",
                    line.number,
                    "custom_id",
                )
            self._seen.add(digest)
        except LineError as error:
            self.errors.append(error.body)

    def finish(self) -> None:
        """That was the last line."""
        if not self.num_requests:
            self.errors.append(LineError("empty_file", "the file holds no request", None).body)


def input_lost(error: CarpoolError) -> LineError:
    """The input cannot be read any further."""
    return LineError("input_file_lost", f"the input cannot be read: {error.message}", None)


def errors_json(errors: list[dict[str, Any]]) -> str:
    """Errors as the record of a batch keeps them; "" for none."""
    return json.dumps(errors, ensure_ascii=False) if errors else ""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
