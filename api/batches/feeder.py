"""From the lines of a batch's input to what the ledger is to accept next."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from api.batches.answers import refusal, undone
from api.batches.envelope import Envelope, LineError, errors_json, input_lost, parse_line
from api.batches.file_store import FileStore
from api.batches.lines import Line, read_lines
from api.batches.requests import ENDPOINTS, draft_line
from api.openai.errors import naming
from api.service import Service
from tasks.batch_types import BatchState, FeedItem, FeedPage
from tasks.calls import MAX_DEADLINE_S
from tasks.codes import CarpoolError

#: Bounds of one page: what one call of a script accepts, and what is in memory.
_PAGE_JOBS: Final = 32
_PAGE_LINES: Final = 256
_PAGE_BYTES: Final = 2**20


class Feeder:
    """Reads on where the batch's cursor stands. It holds nothing: any number of feeders, on any server, are right."""

    def __init__(self, service: Service, store: FileStore) -> None:
        self._service = service
        self._store = store
        self._window = service.settings.batch_window
        self._max_line = service.settings.max_body_bytes

    async def next_page(self, batch: str, state: BatchState) -> FeedPage | None:
        """The next lines; None where there are none, or no room for them."""
        room = min(self._window - len(state.open), _PAGE_JOBS)
        queue_room = _PAGE_JOBS if state.room is None else state.room
        if state.fed or (room <= 0 and not state.ending):
            return None
        items: list[FeedItem] = []
        num_jobs = num_sequences = num_bytes = 0
        at, done = state.at, False
        try:
            file = await self._store.get(state.file, "")
            async for line in read_lines(self._store, file, at, self._max_line):
                if not line.is_blank:
                    if num_jobs >= room and not state.ending:
                        break
                    item = await self._item(batch, state, line)
                    sequences = 0 if item.acceptance is None else len(item.acceptance.jobs)
                    # one that is larger than all the room is offered alone: the ledger takes it when nothing waits
                    if sequences and num_jobs and num_sequences + sequences > queue_room:
                        break
                    items.append(item)
                    num_jobs += item.acceptance is not None
                    num_sequences += sequences
                    num_bytes += len(line.data or b"") + len(item.answer)
                at = line.next
                if len(items) >= _PAGE_LINES or num_bytes >= _PAGE_BYTES:
                    break
            else:
                done = True
        except CarpoolError as error:
            if error.code.name != "file_not_found":
                raise
            return FeedPage(state.at.line, state.at, [], True, errors_json([input_lost(error).body]))
        return FeedPage(state.at.line, at, items, done)

    async def _item(self, batch: str, state: BatchState, line: Line) -> FeedItem:
        job = state.job(line.number)
        envelope: Envelope | None = None
        try:
            envelope = parse_line(line, state.endpoint, self._max_line)
            if state.ending:
                return FeedItem(line.number, answer=undone(batch, line.number, envelope.custom_id, state.ending))
            caller = await self._service.keyring.of_owner(state.owner)
            wanted = await draft_line(
                self._service, ENDPOINTS[state.endpoint], batch, envelope.custom_id, envelope.body, caller
            )
            alias, model = await self._service.models.choose(wanted.draft.options.model, caller)
            with naming(wanted.prompt_field, wanted.tokens_field):
                acceptance = await self._service.intake.prepare(wanted.draft, alias, model, job)
        except LineError as error:
            # it was fine when the batch was validated, by this release
            found = CarpoolError("invalid_request", str(error))
            return FeedItem(line.number, answer=refusal(batch, line.number, None, job, found))
        except CarpoolError as error:
            if error.code.status >= 500 or envelope is None:
                raise
            return FeedItem(line.number, answer=refusal(batch, line.number, envelope.custom_id, job, error))
        # a request that names no deadline of its own has that of the batch
        deadline_s = wanted.draft.options.deadline_s or MAX_DEADLINE_S
        return FeedItem(line.number, replace(acceptance, deadline_s=deadline_s))
