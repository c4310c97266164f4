"""Reads trace files in three formats, which are distinguished by their first line, and writes one
of these formats."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import numpy as np

from baton.errors import Invalid
from baton.traces.json_fields import JsonFields, parse_fields
from baton.traces.trace import Trace, TraceRequest, seeded_generator

FORMAT = "baton-trace-1"

MOONCAKE_BLOCK_TOKENS = 512
"""Fixed by Mooncake's format."""

AZURE_BLOCK_TOKENS = 512
"""Our choice: Azure's format has no blocks, and no two requests share the blocks we assign."""

MAX_TOKENS = 1 << 24
"""Maximum length of a prompt or an answer: more than any model supports, and small enough to list
the blocks."""

Line = tuple[str, str]
"""A line's location (``file:line``), and its text without the newline."""


def read_trace(path: Path) -> Trace:
    """Read the trace at ``path`` and move its first arrival to 0 s. The first line determines the
    format:

    - Mooncake's JSONL (FAST '25 release): ``timestamp`` (ms), ``input_length``, ``output_length``
      (tokens), and ``hash_ids``, one for each block of 512 tokens of the prompt, of which the last
      may be partial;
    - Azure's CSV of LLM inference (2023 and 2024): ``TIMESTAMP,ContextTokens,GeneratedTokens``;
      the file has no block ids, so no two requests share a block;
    - Baton's own JSONL (:func:`write_trace`): a header with ``format``, ``name`` and
      ``block_tokens``, then a line per request.

    Raises Invalid for any other content; the error names the file and, if possible, the line."""
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise Invalid(f"{path}: the file is empty; a trace has at least one request")
    trace = _reader(first)(path.stem, first, lines)
    if not trace.requests:
        raise Invalid(f"{path}: the trace has a header but no requests; at least one is required")
    return trace


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace in Baton's own JSONL: a header, then a line per request. Raises Invalid when
    ``path`` cannot be written."""
    header = {"format": FORMAT, "name": trace.name, "block_tokens": trace.block_tokens}
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(header) + "\n")
            file.writelines(json.dumps(_entry(arrival)) + "\n" for arrival in trace.requests)
    except OSError as error:
        raise Invalid(f"{path}: cannot be written: {error.strerror}") from error


def scale_rate(trace: Trace, rate_factor: float) -> Trace:
    """Return the same requests at ``rate_factor`` times the rate. Raises Invalid unless the factor
    is finite and above 0."""
    if not 0 < rate_factor < float("inf"):
        raise Invalid(
            f"the rate factor is {rate_factor}; it must be finite and above 0", param="rate_factor"
        )
    times = [arrival.arrival_seconds / rate_factor for arrival in trace.requests]
    return _with_times(trace, times)


def add_jitter(trace: Trace, seed: int, granularity_seconds: float = 3.0) -> Trace:
    """Add jitter to a trace with coarse timestamps, such as Mooncake's: each arrival is delayed by
    a uniformly random part of ``granularity_seconds``. The requests keep their order, so that a
    request that reuses a prefix still comes after the one that created it."""
    if not 0 <= granularity_seconds < float("inf"):
        raise Invalid(
            f"granularity_seconds is {granularity_seconds}; it must be finite and at least 0",
            param="granularity_seconds",
        )
    times = np.array([arrival.arrival_seconds for arrival in trace.requests])
    delayed = times + seeded_generator(seed).uniform(0.0, granularity_seconds, len(times))
    return _with_times(trace, np.sort(delayed).tolist())


def _with_times(trace: Trace, times: list[float]) -> Trace:
    pairs = zip(trace.requests, times, strict=True)
    return replace(
        trace, requests=tuple(replace(arrival, arrival_seconds=at) for arrival, at in pairs)
    )


def _lines(path: Path) -> Iterator[Line]:
    """Yield the lines that are not blank."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line.rstrip("\r\n")
    except OSError as error:
        raise Invalid(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Invalid(f"{path}: the file is not UTF-8 text ({error.reason})") from error


_Reader = Callable[[str, Line, Iterator[Line]], Trace]


def _reader(first: Line) -> _Reader:
    where, text = first
    if text.lstrip().startswith("{"):
        names = parse_fields(text, where).values.keys()
        if "format" in names:
            return _read_own
        if names & {"timestamp", "input_length", "output_length", "hash_ids"}:
            return _read_mooncake
    elif "TIMESTAMP" in text.split(","):
        return _read_azure
    raise Invalid(
        f"{where}: unknown format; a trace begins with Mooncake's fields (timestamp, input_length, "
        f'…), with Azure\'s columns ({",".join(_AZURE_COLUMNS)}) or with {{"format": "{FORMAT}"}}'
    )


def _read_mooncake(name: str, first: Line, lines: Iterator[Line]) -> Trace:
    clock = _MonotonicTimes()
    arrivals = [_mooncake_arrival(first, clock)]
    arrivals.extend(_mooncake_arrival(line, clock) for line in lines)
    return Trace(name, MOONCAKE_BLOCK_TOKENS, tuple(arrivals))


def _mooncake_arrival(line: Line, clock: "_MonotonicTimes") -> TraceRequest:
    fields = parse_fields(line[1], line[0])
    at_ms = clock.since_first(fields.where, "timestamp", fields.number("timestamp"))
    num_tokens = fields.integer("input_length", 1, MAX_TOKENS)
    num_answer_tokens = fields.integer("output_length", 0, MAX_TOKENS)
    blocks = _blocks(fields, "hash_ids", num_tokens, MOONCAKE_BLOCK_TOKENS)
    return TraceRequest(at_ms / 1000, num_tokens, num_answer_tokens, blocks)


def _read_own(name: str, first: Line, lines: Iterator[Line]) -> Trace:
    header = parse_fields(first[1], first[0])
    if header.text("format") != FORMAT:
        raise header.invalid_field("format", f"{FORMAT!r}")
    block_tokens = header.integer("block_tokens", 1, MAX_TOKENS)
    clock = _MonotonicTimes()
    arrivals = tuple(_own_arrival(line, clock, block_tokens) for line in lines)
    return Trace(header.text("name"), block_tokens, arrivals)


def _own_arrival(line: Line, clock: "_MonotonicTimes", block_tokens: int) -> TraceRequest:
    fields = parse_fields(line[1], line[0])
    num_tokens = fields.integer("prompt_tokens", 1, MAX_TOKENS)
    return TraceRequest(
        clock.since_first(fields.where, "at_seconds", fields.number("at_seconds")),
        num_tokens,
        fields.integer("answer_tokens", 0, MAX_TOKENS),
        _blocks(fields, "blocks", num_tokens, block_tokens),
        fields.text("session", ""),
        fields.text("tenant", ""),
    )


def _entry(arrival: TraceRequest) -> dict[str, object]:
    entry: dict[str, object] = {
        "at_seconds": arrival.arrival_seconds,
        "prompt_tokens": arrival.num_prompt_tokens,
        "answer_tokens": arrival.num_answer_tokens,
        "blocks": arrival.block_ids,
    }
    if arrival.session:
        entry["session"] = arrival.session
    if arrival.tenant:
        entry["tenant"] = arrival.tenant
    return entry


def _blocks(fields: JsonFields, name: str, num_tokens: int, block_tokens: int) -> tuple[int, ...]:
    blocks = fields.integers(name)
    needed = -(-num_tokens // block_tokens)
    if len(blocks) != needed:
        raise Invalid(
            f"{fields.where}: {name} has {len(blocks)} ids, but must have {needed}: one for each "
            f"block of {block_tokens} tokens of the prompt, which has {num_tokens:,} tokens"
        )
    if len(set(blocks)) != needed:
        raise Invalid(
            f"{fields.where}: {name} contains the same block id twice; an id identifies a block "
            "together with all blocks before it"
        )
    return blocks


_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _read_azure(name: str, first: Line, lines: Iterator[Line]) -> Trace:
    header = [column.strip() for column in first[1].split(",")]
    missing = [column for column in _AZURE_COLUMNS if column not in header]
    if missing:
        needed = ",".join(_AZURE_COLUMNS)
        raise Invalid(
            f"{first[0]}: the column {missing[0]} is missing; the columns must include {needed}"
        )
    clock, ids = _MonotonicTimes(), count()
    arrivals = tuple(_azure_arrival(header, line, clock, ids) for line in lines)
    return Trace(name, AZURE_BLOCK_TOKENS, arrivals)


def _azure_arrival(
    header: list[str], line: Line, clock: "_MonotonicTimes", ids: Iterator[int]
) -> TraceRequest:
    fields = _azure_fields(header, line)
    microseconds = clock.since_first(fields.where, "TIMESTAMP", _azure_microseconds(fields))
    num_tokens = fields.integer("ContextTokens", 1, MAX_TOKENS)
    return TraceRequest(
        microseconds / 1e6,
        num_tokens,
        fields.integer("GeneratedTokens", 0, MAX_TOKENS),
        tuple(next(ids) for _ in range(-(-num_tokens // AZURE_BLOCK_TOKENS))),
    )


def _azure_fields(header: list[str], line: Line) -> JsonFields:
    where, text = line
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != len(header):
        raise Invalid(
            f"{where}: the line has {len(cells)} cells, but the header has {len(header)} columns"
        )
    return JsonFields(where, dict(zip(header, map(_cell, cells), strict=True)))


def _cell(text: str) -> int | str:
    """Return a CSV cell as an int if it is a whole number, otherwise as text, since CSV has no
    types."""
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else text


def _azure_microseconds(fields: JsonFields) -> int:
    """Return the TIMESTAMP in microseconds since 1970; finer digits are dropped. A time without a
    time zone is taken as UTC."""
    try:
        at = datetime.fromisoformat(fields.text("TIMESTAMP"))
    except ValueError as error:
        raise fields.invalid_field(
            "TIMESTAMP", "a time like 2023-11-16 18:15:46.6805900"
        ) from error
    zoned = at if at.tzinfo else at.replace(tzinfo=UTC)
    return (zoned - _EPOCH) // timedelta(microseconds=1)


class _MonotonicTimes:
    """Checks that the times of a file don't decrease, and makes them relative to the first."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0

    def since_first(self, where: str, name: str, at: float) -> float:
        if self._first is None:
            self._first = self._last = at
        if at < self._last:
            raise Invalid(
                f"{where}: {name} is earlier than in the previous line; times must not decrease"
            )
        self._last = at
        return at - self._first
