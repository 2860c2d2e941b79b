"""Files as Redis holds them: in chunks, each written and read by itself."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import redis.asyncio
from redis.client import NEVER_DECODE

from api.batches.listing import Record, list_records, read_record
from tasks import keys
from tasks.batch_calls import BatchCalls
from tasks.batch_types import NewFile
from tasks.calls import FILE_CHUNK_BYTES
from tasks.codes import CarpoolError
from tasks.ledger import AsyncLedger
from tasks.settings import Settings

ID_PREFIX: Final = "file-"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file. Times are seconds since 1970."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    num_chunks: int
    created_at: int
    expires_at: int


class FileStore:
    """Writes, reads and lists files."""

    def __init__(self, client: redis.asyncio.Redis, ledger: AsyncLedger, calls: BatchCalls, settings: Settings) -> None:
        self._client = client
        self._ledger = ledger
        self._calls = calls
        self._settings = settings

    def writer(self) -> FileWriter:
        """A new file, to be written."""
        return FileWriter(self._ledger, self._calls, self._settings)

    async def get(self, id: str, owner: str) -> StoredFile:
        """A file of this owner's; "" sees all. Raises CarpoolError "file_not_found"."""
        record = await read_record(self._client, keys.file(id), owner)
        if not record:
            raise file_not_found(id)
        return _parse(record)

    async def chunks(self, file: StoredFile) -> AsyncIterator[bytes]:
        """The bytes that the file has now; one that grows meanwhile is read up to there.

        Raises:
            CarpoolError: "file_not_found" where the file is deleted meanwhile.
        """
        left = file.num_bytes
        for n in range(file.num_chunks):
            data = (await self.chunk(file.id, n))[:left]
            left -= len(data)
            yield data

    async def chunk(self, id: str, n: int) -> bytes:
        """One chunk. Raises CarpoolError "file_not_found"."""
        # the client decodes answers, and a chunk may end within a character
        execute: Any = self._client.execute_command
        data = await execute("GET", keys.file_chunk(id, n), **{NEVER_DECODE: True})
        if data is None:
            raise file_not_found(id)
        return cast(bytes, data)

    async def list_files(
        self, owner: str, *, after: str, limit: int, newest_first: bool, purpose: str
    ) -> tuple[list[StoredFile], bool]:
        """An owner's files by time behind file `after` ("": from the beginning), and whether there are more.

        Args:
            purpose: files of this one alone; "" for all.

        Raises:
            CarpoolError: "file_not_found" where `after` is none.
        """
        try:
            records, has_more = await list_records(
                self._client,
                keys.files(owner),
                keys.file,
                after=after,
                limit=limit,
                newest_first=newest_first,
                wanted=lambda record: not purpose or record["purpose"] == purpose,
            )
        except LookupError:
            raise file_not_found(after) from None
        return [_parse(record) for record in records], has_more

    async def delete(self, id: str, owner: str) -> None:
        """Raises CarpoolError "file_not_found", "file_in_use"."""
        verdict = await self._ledger.run(self._calls.delete_file(id, owner=owner))
        if verdict == "gone":
            raise file_not_found(id)
        if verdict == "in_use":
            raise CarpoolError(
                "file_in_use", f"file {id} belongs to a batch that has not ended. Wait for its end, or cancel it first"
            )


class FileWriter:
    """A file that is being written: at most one chunk of it is in memory."""

    def __init__(self, ledger: AsyncLedger, calls: BatchCalls, settings: Settings) -> None:
        self.id = f"{ID_PREFIX}{uuid.uuid4().hex}"
        self.num_bytes = 0
        self._ledger = ledger
        self._calls = calls
        self._most = settings.max_file_bytes
        self._pending = bytearray()
        self._num_chunks = 0

    async def write(self, data: bytes) -> None:
        """Raises CarpoolError "file_too_large", "files_full"."""
        self.num_bytes += len(data)
        if self.num_bytes > self._most:
            raise CarpoolError(
                "file_too_large",
                f"a file may have {self._most} bytes (CARPOOL_MAX_FILE_BYTES), and this one is longer. Split it",
                param="file",
            )
        self._pending += data
        while len(self._pending) >= FILE_CHUNK_BYTES:
            await self._store(bytes(self._pending[:FILE_CHUNK_BYTES]))
            del self._pending[:FILE_CHUNK_BYTES]

    async def finish(self, file: NewFile) -> str:
        """Make it a file with what `file` says of it, ids and sizes apart. Returns its id, or that of the file that the
        same idempotency key has made.

        Raises:
            CarpoolError: "files_full", "idempotency_conflict", or "invalid_request" where it took too long.
        """
        if self._pending:
            await self._store(bytes(self._pending))
            self._pending.clear()
        whole = replace(file, id=self.id, num_bytes=self.num_bytes, num_chunks=self._num_chunks)
        verdict, id = await self._ledger.run(self._calls.finish_file(whole))
        if verdict == "ok":
            return id
        await self.discard()
        if verdict == "conflict":
            raise CarpoolError(
                "idempotency_conflict",
                f"this Idempotency-Key was used with another file, {id}. Take a new key for a new file",
                param="Idempotency-Key",
            )
        if verdict == "lost":
            raise CarpoolError("invalid_request", "the upload took more than an hour. Send it again, or in parts")
        return id

    async def discard(self) -> None:
        """Forget what was written so far."""
        await self._ledger.run(self._calls.delete_file(self.id, self._num_chunks + 1))

    async def _store(self, data: bytes) -> None:
        total = await self._ledger.run(self._calls.append_chunk(self.id, self._num_chunks, data))
        if total is not None:
            raise CarpoolError(
                "files_full",
                f"the files here have {total} bytes and may have no more (CARPOOL_MAX_FILES_BYTES). Delete some "
                "with DELETE /v1/files/{id}, or wait until they expire",
                param="file",
            )
        self._num_chunks += 1


def _parse(record: Record) -> StoredFile:
    return StoredFile(
        record["id"],
        record["filename"],
        record["purpose"],
        int(record["bytes"]),
        int(record["chunks"]),
        int(record["created_at"]) // 1000,
        int(record["expires_at"]) // 1000,
    )


def file_not_found(id: str) -> CarpoolError:
    """No such file, or no longer."""
    return CarpoolError("file_not_found", f"there is no file {id[:128]!r}: it never was, was deleted, or has expired")
