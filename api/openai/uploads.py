"""Forms with a file in them, read as they come: small fields are kept, the file's bytes are handed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from api.errors import ClientLeft
from tasks.codes import CarpoolError

_MAX_FIELD_BYTES: Final = 1024
_MAX_FIELDS: Final = 8
_MAX_NAME: Final = 256
_FILE: Final = "file"


class UploadForm:
    """A multipart form with one file.

    Attributes:
        fields: the form's fields but for the file.
        filename: "" until the file has begun, and where it has no name.
        has_file: the file has begun.
    """

    def __init__(self, content_type: str) -> None:
        """Raises CarpoolError "unsupported_media_type"."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise CarpoolError(
                "unsupported_media_type",
                f"the Content-Type is {content_type[:80]!r}. Send the file as multipart/form-data, with its boundary",
            )
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.has_file = False
        self._name = ""
        self._value = bytearray()
        self._file = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._has_ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": lambda data, start, end: _extend(self._header, data[start:end]),
                    "on_header_value": lambda data, start, end: _extend(self._header_value, data[start:end]),
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_ends,
                    "on_end": self._form_ends,
                },
            )
        except MultipartParseError as error:
            raise _broken(str(error)) from None

    async def read(self, request: Request, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Read the body to its end; `write` gets the bytes of the file, in order.

        Raises:
            CarpoolError: the body is no such form; what `write` raises.
            ClientLeft: so did the client, before the end of the body.
        """
        try:
            async for data in request.stream():
                self._parser.write(data)
                if self._file:
                    await write(bytes(self._file))
                    self._file.clear()
        except MultipartParseError as error:
            raise _broken(str(error)) from None
        except ClientDisconnect:
            raise ClientLeft from None
        if not self._has_ended:
            raise _broken("it ends before its last boundary")

    def _part_begins(self) -> None:
        self._headers.clear()
        self._value.clear()
        self._name = ""

    def _header_ends(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == _FILE:
            if self.has_file:
                raise _broken("it has more than one file")
            self.has_file = True
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:_MAX_NAME]
        elif not self._name or self._name in self.fields or len(self.fields) >= _MAX_FIELDS:
            raise _broken(f"it has a field too many, or one without a name: {self._name[:80]!r}")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._file += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise _broken(f"its field {self._name[:80]!r} is longer than {_MAX_FIELD_BYTES} bytes")

    def _part_ends(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _form_ends(self) -> None:
        self._has_ended = True


def _extend(header: bytearray, data: bytes) -> None:
    header += data
    if len(header) > _MAX_FIELD_BYTES:
        raise _broken(f"a header in it is longer than {_MAX_FIELD_BYTES} bytes")


def _broken(reason: str) -> CarpoolError:
    return CarpoolError(
        "invalid_request", f"the form cannot be read: {reason[:200]}. Send multipart/form-data with purpose and file"
    )
