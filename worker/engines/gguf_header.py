"""What a GGUF file says of itself at its beginning: its metadata, and how many weights it holds.

Read by the format's definition (ggml's docs/gguf.md), in a fraction of a second: the readers of libraries take seconds
for the arrays of a vocabulary, which are passed over here.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
#: Types of values that have a size of their own, as struct knows them.
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
#: Longer arrays are vocabularies.
_MAX_ARRAY: Final = 4096


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's header.

    Attributes:
        metadata: by name, those of the architecture without its name in front; long arrays are left out.
        num_weights: numbers in all tensors together.
    """

    metadata: dict[str, Any]
    num_weights: int


def read_header(file: Path) -> GgufHeader | None:
    """The header of a GGUF file; None where it has none that can be read: its conversion will say why."""
    try:
        with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (OSError, ValueError, KeyError, struct.error):
        return None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != _MAGIC or self._number("<I") not in _VERSIONS:
            raise ValueError("not a GGUF file of a version that is known")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            name = self._string()
            values[name] = self._value(self._number("<I"))
        num_weights = 0
        for _ in range(num_tensors):
            self._string()
            num_weights += math.prod(self._number("<Q") for _ in range(self._number("<I")))
            self._bytes(12)  # its type and its place
        prefix = f"{values.get('general.architecture')}."
        return GgufHeader({name.removeprefix(prefix): value for name, value in values.items()}, num_weights)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        of, count = self._number("<I"), self._number("<Q")
        if count <= _MAX_ARRAY:
            return [self._value(of) for _ in range(count)]
        if of == _STRING:
            for _ in range(count):
                self._bytes(self._number("<Q"))
        else:
            self._bytes(count * struct.calcsize(_SCALARS[of]))
        return None

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode(errors="replace")

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return number

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ValueError("the file ends within its header")
        found, self._at = self._data[self._at : end], end
        return found
