"""Tests trace files in all three formats: parsing, errors in invalid files, and rescaling."""

from pathlib import Path

import pytest

from baton.errors import Invalid
from baton.traces.files import MAX_TOKENS, add_jitter, read_trace, scale_rate, write_trace
from baton.traces.trace import Trace, TraceRequest

MOONCAKE = """\
{"timestamp": 27000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 27000, "input_length": 1025, "output_length": 0, "hash_ids": [0, 1, 2]}
{"timestamp": 30500, "input_length": 1, "output_length": 7, "hash_ids": [9]}
"""

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:46.6805909,513,109
2023-11-16 18:16:00.1805900,512,0
"""

HEADER = '{"format": "baton-trace-1", "name": "tiny", "block_tokens": 64}\n'
ENTRY = '{"at_seconds": 0.5, "prompt_tokens": 65, "answer_tokens": 3, "blocks": [4, 5]}\n'

OWN = Trace(
    "tiny",
    64,
    (
        TraceRequest(0.0, 65, 3, (4, 5)),
        TraceRequest(0.1 + 0.2, 64, 0, (4,), session="täglich\u2028", tenant="a"),
        TraceRequest(1e6, 1, 1, (-7,), tenant="b"),
    ),
)


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake_format_is_read(tmp_path: Path) -> None:
    assert read_trace(file(tmp_path, MOONCAKE)) == Trace(
        "t",
        512,
        (
            TraceRequest(0.0, 1024, 5, (0, 1)),
            TraceRequest(0.0, 1025, 0, (0, 1, 2)),
            TraceRequest(3.5, 1, 7, (9,)),
        ),
    )


def test_azure_requests_get_blocks_of_their_own(tmp_path: Path) -> None:
    assert read_trace(file(tmp_path, AZURE)) == Trace(
        "t",
        512,
        (
            TraceRequest(0.0, 374, 44, (0,)),
            TraceRequest(0.0, 513, 109, (1, 2)),
            TraceRequest(13.5, 512, 0, (3,)),
        ),
    )


def test_azure_times_of_2024_have_a_time_zone(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-12 00:00:00.001163+00:00,1,2\n"
        "2024-05-12 02:00:01.001163+02:00,3,4\n"
    )
    times = [arrival.arrival_seconds for arrival in read_trace(file(tmp_path, text)).requests]
    assert times == [0.0, 1.0]


def test_csv_columns_may_be_reordered_with_crlf_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufeffContextTokens,TIMESTAMP,GeneratedTokens\r\n374,2023-11-16 18:15:46,44\r\n\r\n"
    assert read_trace(file(tmp_path, text)).requests == (TraceRequest(0.0, 374, 44, (0,)),)


def test_written_trace_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    write_trace(OWN, path)
    assert read_trace(path) == OWN
    assert path.read_text().splitlines()[0] == HEADER.strip()


def test_own_times_are_moved_to_zero(tmp_path: Path) -> None:
    trace = read_trace(file(tmp_path, HEADER + ENTRY + ENTRY.replace("0.5", "2")))
    assert [arrival.arrival_seconds for arrival in trace.requests] == [0.0, 1.5]


def mooncake(**changed: str) -> str:
    """Return a trace in Mooncake's format. ``changed`` maps fields of the second line to their JSON
    values; a field whose value is "" is left out."""
    values = {
        "timestamp": "28000",
        "input_length": "1024",
        "output_length": "5",
        "hash_ids": "[0, 1]",
    } | changed
    line = ", ".join(f'"{name}": {value}' for name, value in values.items() if value)
    return MOONCAKE.splitlines()[0] + "\n{" + line + "}\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (mooncake(hash_ids=""), 2, "hash_ids is missing; the object has only the fields time"),
        (mooncake(input_length='"9"'), 2, "input_length is '9'; it must be a whole number from 1 "),
        (mooncake(input_length="true"), 2, "input_length is True; it must be a whole number"),
        (mooncake(input_length="10.0"), 2, "input_length is 10.0; it must be a whole number"),
        (mooncake(input_length="0"), 2, "input_length is 0; it must be a whole number from 1 to"),
        (mooncake(input_length="-3"), 2, "input_length is -3; it must be a whole number from 1 to"),
        (mooncake(input_length=str(MAX_TOKENS + 1)), 2, "is 16777217; it must be a whole number"),
        (mooncake(output_length="-1"), 2, "output_length is -1; it must be a whole number from 0 "),
        (mooncake(timestamp="26999"), 2, "timestamp is earlier than in the previous line; times m"),
        (mooncake(timestamp="NaN"), 2, "timestamp is nan; it must be a finite number"),
        (mooncake(timestamp="1" + "0" * 400), 2, "it must be a finite number"),
        (mooncake(timestamp="null"), 2, "timestamp is None; it must be a number"),
        (mooncake(hash_ids="[0]"), 2, "hash_ids has 1 ids, but must have 2: one for each"),
        (mooncake(hash_ids="[0, 1, 2]"), 2, "hash_ids has 3 ids, but must have 2: one for each"),
        (mooncake(hash_ids="[7, 7]"), 2, "hash_ids contains the same block id twice; an id iden"),
        (mooncake(hash_ids="[0, 1.5]"), 2, "hash_ids is [0, 1.5]; it must be a list of whole num"),
        (mooncake(hash_ids="3"), 2, "hash_ids is 3; it must be a list of whole numbers"),
        (mooncake() + "{", 3, "not JSON ("),
        (mooncake() + "[" * 100_000, 3, "not JSON ("),
        (mooncake() + "\n7", 4, "7 is not a JSON object; it must be one"),
        ('{"timestamp": 1}', 1, "input_length is missing; the object has only the fields t"),
        (AZURE + "2023-11-16 18:16:00.1805900,512", 5, "line has 2 cells, but the header has 3 c"),
        (AZURE + "yesterday,512,1", 5, "TIMESTAMP is 'yesterday'; it must be a time like 2023-"),
        (AZURE + "5,512,1", 5, "TIMESTAMP is 5; it must be a string"),
        (AZURE + "2023-11-16 18:15:59,512,1", 5, "TIMESTAMP is earlier than in the previous line"),
        (AZURE + "2023-11-16 18:17:00,0,1", 5, "ContextTokens is 0; it must be a whole number f"),
        (AZURE + "2023-11-16 18:17:00,9,-1", 5, "GeneratedTokens is -1; it must be a whole numb"),
        (AZURE + "2023-11-16 18:17:00,many,1", 5, "ContextTokens is 'many'; it must be a whole n"),
        ("TIMESTAMP,ContextTokens\n", 1, "column GeneratedTokens is missing; the columns must inc"),
        (
            HEADER + ENTRY.replace("[4, 5]", "[4]"),
            2,
            "blocks has 1 ids, but must have 2: one for each block of 64 tokens of the prompt, "
            "which has 65 tokens",
        ),
        (HEADER + ENTRY + ENTRY.replace("0.5", "0.4"), 3, "at_seconds is earlier than in the"),
        (HEADER + ENTRY.replace("{", '{"tenant": 1, '), 2, "tenant is 1; it must be a string"),
        (HEADER.replace("64", "0"), 1, "block_tokens is 0; it must be a whole number from 1 to"),
        (HEADER.replace("-1", "-2"), 1, "format is 'baton-trace-2'; it must be 'baton-trace-1'"),
        (HEADER.replace(', "block_tokens": 64', ""), 1, "block_tokens is missing; the object has"),
        ('{"prompt": "hello"}', 1, "unknown format; a trace begins with Mooncake's fields (time"),
        ("at,tokens\n1,2\n", 1, "unknown format; a trace begins with Mooncake's fields (timestam"),
    ],
)
def test_invalid_trace_error_names_line_and_constraint(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = file(tmp_path, text)
    with pytest.raises(Invalid) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; a trace has at least one request"),
        ("\n  \n", "the file is empty; a trace has at least one request"),
        (HEADER, "the trace has a header but no requests; at least one is required"),
        (AZURE.splitlines()[0], "the trace has a header but no requests; at least one is required"),
    ],
)
def test_trace_without_requests_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(Invalid) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}: {message}"


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(Invalid, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(Invalid, match="cannot be written: Is a directory"):
        write_trace(OWN, tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Invalid, match="not UTF-8 text"):
        read_trace(tmp_path / "binary")


def test_scaling_changes_only_times() -> None:
    assert scale_rate(OWN, 2.0) == Trace(
        "tiny",
        64,
        (
            TraceRequest(0.0, 65, 3, (4, 5)),
            TraceRequest((0.1 + 0.2) / 2, 64, 0, (4,), session="täglich\u2028", tenant="a"),
            TraceRequest(5e5, 1, 1, (-7,), tenant="b"),
        ),
    )
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(Invalid, match="the rate factor is"):
            scale_rate(OWN, factor)


SEED = 20_251


def test_jitter_spreads_each_tick_and_keeps_the_order() -> None:
    ticks = 40
    arrivals = tuple(TraceRequest(3.0 * (i // 100), 1, 1, (i,)) for i in range(100 * ticks))
    trace = Trace("ticks", 64, arrivals)
    moved = add_jitter(trace, SEED)
    times = [arrival.arrival_seconds for arrival in moved.requests]
    assert [arrival.block_ids for arrival in moved.requests] == [a.block_ids for a in arrivals]
    assert times == sorted(times), f"seed {SEED}"
    assert [int(at // 3.0) for at in times] == [i // 100 for i in range(100 * ticks)], f"{SEED=}"
    thirds = [sum(third <= at % 3.0 < third + 1 for at in times) for third in range(3)]
    assert all(abs(count - 100 * ticks / 3) < 150 for count in thirds), f"{thirds}, seed {SEED}"
    assert moved == add_jitter(trace, SEED) != add_jitter(trace, SEED + 1)


def test_zero_jitter_changes_nothing_and_invalid_jitter_is_rejected() -> None:
    assert add_jitter(OWN, SEED, granularity_seconds=0.0) == OWN
    with pytest.raises(
        Invalid, match=r"granularity_seconds is -1.0; it must be finite and at least 0"
    ):
        add_jitter(OWN, SEED, granularity_seconds=-1.0)
    with pytest.raises(Invalid, match="the seed is -1; it must not be negative"):
        add_jitter(OWN, -1)
