"""A batch that is being answered: what is next, and what was written."""

import os
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from baton.core.ids import TenantId
from router.batches.batch import Batch, BatchStatus
from router.batches.batch_request import (
    BatchRequest,
    BatchResponse,
    encode_output_line,
    parse_batch_request,
    parse_request_number,
)
from router.batches.batch_store import BatchStore
from router.batches.file_store import StoredFile
from router.batches.inflight_journal import MAX_ROUTER_DEATHS, InflightJournal
from router.errors import ApiError

MAX_BATCH_REQUESTS = 50_000
"""Of one batch, as at OpenAI."""

OUTPUT, ERROR = "output", "error"


class BatchJob:
    """Everything here touches the disk and nothing waits: it is called off the event loop.

    What was written stays written: a job that is opened again goes on after it. A line whose answer
    was lost is asked again, unless its router died of it, as far as can be known: lines that were
    under way at a death are suspects, of which the runner asks one at a time, and a suspect that
    was under way at a second death is written down as failed.
    """

    def __init__(self, library: BatchStore, batch: Batch, max_line_bytes: int) -> None:
        self.batch = batch
        self._library = library
        self._max_line_bytes = max_line_bytes
        self._again: deque[BatchRequest] = deque()
        self._suspects: deque[BatchRequest] = deque()
        self._attempts = InflightJournal(library.part(batch, "attempts"))
        self._deaths: Counter[int] = Counter()
        self._ids: set[str] = set()
        self._written: set[int] = set()
        self._lines: Iterator[BatchRequest] = iter(())
        self._parts: dict[str, BinaryIO] = {}
        self._input: BinaryIO | None = None
        self.num_running = 0
        self.not_before = 0.0
        self.num_refusals = 0

    def open(self, now: float) -> None:
        """Begins, or goes on. A batch whose file can't be is failed."""
        if self.batch.status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
            self._recover()
            return
        shelf = self._library.shelf(TenantId(self.batch.tenant))
        try:
            path = shelf.data(shelf.get(self.batch.input_file_id).id)
            total = _count_lines(path, self._max_line_bytes)
            if not 0 < total <= MAX_BATCH_REQUESTS:
                raise ApiError(
                    400, f"a batch has 1 to {MAX_BATCH_REQUESTS} lines, and the file has {total}"
                )
            self._input = path.open("rb")
        except (ApiError, OSError) as error:
            self.fail(str(error), now)
            return
        self._deaths = self._attempts.deaths()
        self.batch.completed = self.batch.failed = 0
        for kind, number in self._recover():
            self._written.add(number)
            self._count(kind == OUTPUT)
        self._lines = self._unwritten(self._input)
        self.batch.total = total
        if self.batch.status is BatchStatus.VALIDATING:
            self.batch.become(BatchStatus.IN_PROGRESS, now)
        self.save()

    def next_line(self, now: float, *, suspects: bool = True) -> BatchRequest | None:
        """What is to be asked, if anything is left, with or without suspects. Lines that can't be
        are written down."""
        self._look_at_the_clock(now)
        while self.batch.status is BatchStatus.IN_PROGRESS:
            line = self._take(suspects)
            if line is None:
                return None
            try:
                if not line.wrong:
                    self._attempts.begin(line.number)
                    return line
                self._write(line, None, line.code, line.wrong)
            except OSError:
                self._keep(line)
                raise
        return None

    def is_suspect(self, line: BatchRequest) -> bool:
        """Whether a router died while the line was under way."""
        return self._deaths[line.number] > 0

    def put_back(self, line: BatchRequest) -> None:
        self.give_up(line)
        self._keep(line)

    def give_up(self, line: BatchRequest) -> None:
        """No router died of the line."""
        if not self.batch.is_over:
            self._attempts.end(line.number)

    def note_reply(self, line: BatchRequest, reply: BatchResponse) -> None:
        self._note(line, reply)

    def note_crash(self, line: BatchRequest, why: str) -> None:
        """The line raised what nobody foresaw: that ends it alone."""
        self._note(line, None, "internal_error", why)

    def finish_if_done(self, now: float) -> bool:
        """Whether the batch is over. To be asked when no line runs."""
        batch = self.batch
        if batch.is_over:
            return True
        self._look_at_the_clock(now)
        if self.num_running or (batch.status is BatchStatus.IN_PROGRESS and self._has_more()):
            return False
        if batch.status is BatchStatus.IN_PROGRESS:
            batch.become(BatchStatus.FINALIZING, now)
            self.save()
        self._hand_out(now)
        batch.become(batch.ending, now)
        self.close()
        self.save()
        return True

    def save(self) -> None:
        self._library.save(self.batch)

    def close(self) -> None:
        self._attempts.close()
        for part in (*self._parts.values(), *([self._input] if self._input else [])):
            part.close()

    # -- what is next ----------------------------------------------------------------------------

    def _unwritten(self, file: BinaryIO) -> Iterator[BatchRequest]:
        for number, data in enumerate(_iter_lines(file, self._max_line_bytes)):
            line = parse_batch_request(number, data, self.batch.endpoint)
            if line.custom_id is not None and line.custom_id in self._ids:
                line = BatchRequest(
                    number, line.custom_id, {}, "custom_id was used by a line before"
                )
            if line.custom_id is not None:
                self._ids.add(line.custom_id)
            if number not in self._written:
                yield self._tried(line)

    def _tried(self, line: BatchRequest) -> BatchRequest:
        """As it is, or refused for what it did."""
        deaths = self._deaths[line.number]
        if line.wrong or deaths < MAX_ROUTER_DEATHS:
            return line
        why = f"the router ended {deaths} times while this line was under way: not tried again"
        return BatchRequest(line.number, line.custom_id, {}, why, "router_died")

    def _take(self, suspects: bool) -> BatchRequest | None:
        """Suspects come last."""
        if self._again:
            return self._again.popleft()
        for line in self._lines:
            if line.wrong or not self.is_suspect(line):
                return line
            self._suspects.append(line)
        return self._suspects.popleft() if suspects and self._suspects else None

    def _has_more(self) -> bool:
        if not self._again and not self._suspects:
            line = next(self._lines, None)
            if line is None:
                return False
            self._keep(line)
        return True

    def _look_at_the_clock(self, now: float) -> None:
        batch = self.batch
        if batch.status is not BatchStatus.IN_PROGRESS:
            return
        if self._library.is_cancelled(batch):
            batch.become(BatchStatus.CANCELLING, now)
            self.save()
        elif now >= batch.expires_at and not self.num_running:
            self._expire(now)

    def _expire(self, now: float) -> None:
        late = "the batch's window of 24 h was over before this line's turn"
        for line in (*self._again, *self._suspects, *self._lines):
            self._write(line, None, "batch_expired", late)
        self.batch.times[BatchStatus.EXPIRED] = int(now)
        self.batch.become(BatchStatus.FINALIZING, now)
        self.save()

    def fail(self, why: str, now: float) -> None:
        """Ends the batch with a reason; what was written of it so far is handed out. Raises OSError
        where that can't be written."""
        self.batch.errors = [
            {"code": "invalid_file", "message": why, "param": "input_file_id", "line": None}
        ]
        self._hand_out(now)
        self.batch.become(BatchStatus.FAILED, now)
        self.close()
        self.save()

    def _keep(self, line: BatchRequest) -> None:
        """For later."""
        (self._suspects if self.is_suspect(line) else self._again).append(line)

    # -- what was written ------------------------------------------------------------------------

    def _note(
        self, line: BatchRequest, reply: BatchResponse | None, code: str = "", why: str = ""
    ) -> None:
        if self.batch.is_over:  # its files failed while the line was under way
            return
        self._write(line, reply, code, why)
        self._attempts.end(line.number)
        self.save()

    def _write(
        self, line: BatchRequest, reply: BatchResponse | None, code: str = "", why: str = ""
    ) -> None:
        good = reply is not None and reply.status == 200
        part = self._part(OUTPUT if good else ERROR)
        part.write(encode_output_line(self.batch.id, line, reply, code, why))
        part.flush()
        self._written.add(line.number)
        self._count(good)

    def _count(self, good: bool) -> None:
        self.batch.completed += good
        self.batch.failed += not good

    def _part(self, kind: str) -> BinaryIO:
        if kind not in self._parts:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            file = os.open(self._library.part(self.batch, kind), flags, 0o600)
            self._parts[kind] = os.fdopen(file, "ab")
        return self._parts[kind]

    def _recover(self) -> list[tuple[str, int]]:
        """The numbers of lines that were written before, and where; one that was cut off is taken
        away."""
        found: list[tuple[str, int]] = []
        for kind in (OUTPUT, ERROR):
            path = self._library.part(self.batch, kind)
            if not path.exists():
                continue
            whole = 0
            with path.open("rb") as part:
                for data in part:
                    number = parse_request_number(data) if data.endswith(b"\n") else None
                    if number is None:
                        break
                    whole += len(data)
                    found.append((kind, number))
            os.truncate(path, whole)
        return found

    def _hand_out(self, now: float) -> None:
        """What was written becomes files of the tenant's. Doing it twice does it once."""
        batch, tenant = self.batch, TenantId(self.batch.tenant)
        name = batch.id.removeprefix("batch_")
        for kind, digit in ((OUTPUT, "0"), (ERROR, "1")):
            path, file_id = self._library.part(batch, kind), f"file-{name}{digit}"
            shelf = self._library.shelf(tenant)
            if not path.exists() and not shelf.data(file_id).exists():
                continue
            size = (path if path.exists() else shelf.data(file_id)).stat().st_size
            expires = None if batch.output_seconds is None else int(now) + batch.output_seconds
            filename = f"{batch.id}_{kind}.jsonl"
            shelf.add(StoredFile(file_id, size, int(now), filename, "batch_output", expires), path)
            if kind == OUTPUT:
                batch.output_file_id = file_id
            else:
                batch.error_file_id = file_id


def _iter_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Without empty ones. One that is too long comes cut, and so as no JSON."""
    while data := file.readline(max_bytes + 1):
        rest = data
        while not rest.endswith(b"\n") and (rest := file.readline(max_bytes + 1)):
            data = data[:max_bytes]
        if data.strip():
            yield data


def _count_lines(path: Path, max_bytes: int) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in _iter_lines(file, max_bytes))
