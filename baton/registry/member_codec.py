"""Members as JSON. They are validated when they are read, since Redis may contain anything."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import orjson

from baton.core.adapter import (
    ADAPTER_DIGEST_BYTES,
    MAX_ADAPTER_ERROR,
    MAX_ADAPTERS,
    WorkerAdapter,
    is_adapter_name,
)
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import Incarnation, WorkerId
from baton.core.kv_codec import CodecSpeed, KvCodecName, KvCodecs
from baton.core.member import Member
from baton.core.pending_settings import PendingSettings
from baton.core.server_api import KNOWN_PATHS, ServerApi
from baton.core.states import Role, WorkerState
from baton.core.worker_load import MAX_QUEUED, QueuedWork, WorkerLoad
from baton.errors import Invalid
from baton.registry.limits import MAX_GENERATION, MAX_MEMBER_BYTES, MAX_NUMBER, MIN_RATE

T = TypeVar("T")


def member_to_json(member: Member) -> bytes:
    fields = asdict(member)
    fields["adapters"] = [asdict(each) | {"digest": each.digest.hex()} for each in member.adapters]
    return orjson.dumps(fields)


def member_from_json(data: bytes) -> Member:
    """Parse a member. Raises Invalid if ``data`` is not a valid member."""
    if len(data) > MAX_MEMBER_BYTES:
        raise Invalid(
            f"a member's record must have at most {MAX_MEMBER_BYTES} bytes, not {len(data)}"
        )
    try:
        raw = orjson.loads(data)
        return Member(
            id=WorkerId(_text(raw, "id")),
            role=Role(raw["role"]),
            generation=Incarnation(_count(raw, "generation", MAX_GENERATION)),
            state=WorkerState(raw["state"]),
            transports=tuple(str(name) for name in raw.get("transports", ())),
            load=_load(raw["load"]),
            address=_text(raw, "address"),
            host=_text(raw, "host"),
            local_socket=_text(raw, "local_socket"),
            framed_address=_text(raw, "framed_address") if "framed_address" in raw else "",
            numerics_fingerprint=(
                _hex(raw, "numerics_fingerprint") if "numerics_fingerprint" in raw else ""
            ),
            model=_text(raw, "model"),
            model_digest=_hex(raw, "model_digest"),
            kv_dtype=_text(raw, "kv_dtype"),
            kv_layout=_text(raw, "kv_layout") if "kv_layout" in raw else "",
            kv_bytes_per_token=_number(raw, "kv_bytes_per_token"),
            device=_text(raw, "device"),
            computed_by=_text(raw, "computed_by") if "computed_by" in raw else "",
            pid=_number(raw, "pid"),
            block_tokens=_number(raw, "block_tokens"),
            max_model_tokens=_number(raw, "max_model_tokens"),
            pending_settings=_pending_settings(raw.get("pending_settings", {})),
            adapters=_adapters(raw.get("adapters", [])),
            kv_codecs=_kv_codecs(raw.get("kv_codecs", {})),
            codec_speeds=_codec_speeds(raw.get("codec_speeds", [])),
            reports_blocks=raw.get("reports_blocks") is True,
            server_api=_server_api(raw.get("server_api", {"model": "", "paths": ()})),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"the record is not a valid member: {error}") from error


def _pending_settings(raw: Any) -> PendingSettings:
    """Parse pending settings. Members that run Baton's previous version don't send the fields,
    which then count as empty."""
    names = raw.get("restart_needed", ())
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"restart_needed is {names!r}; it must be a list of names")
    return PendingSettings(tuple(names), _text({"rejected": "", **raw}, "rejected"))


def _kv_codecs(raw: Any) -> KvCodecs:
    """Parse the configured codecs. Members that run Baton's previous version have none."""
    return KvCodecs(*(KvCodecName(raw.get(tier, "none")) for tier in ("wire", "store", "disk")))


def _codec_speeds(raw: Any) -> tuple[CodecSpeed, ...]:
    if not isinstance(raw, list) or len(raw) > len(KvCodecName):
        raise ValueError(f"codec_speeds must be a list of at most {len(KvCodecName)} entries")
    return tuple(
        CodecSpeed(
            KvCodecName(entry["codec"]),
            min(_amount(entry, "ratio"), 1.0),
            _rate(entry, "encode_bytes_per_second"),
            _rate(entry, "decode_bytes_per_second"),
        )
        for entry in raw
    )


def _adapters(raw: Any) -> tuple[WorkerAdapter, ...]:
    if not isinstance(raw, list) or len(raw) > MAX_ADAPTERS:
        raise ValueError(f"adapters must be a list of at most {MAX_ADAPTERS} entries")
    return tuple(_adapter(entry) for entry in raw)


def _adapter(raw: Any) -> WorkerAdapter:
    name, digest = _text(raw, "name"), bytes.fromhex(_text(raw, "digest"))
    if not is_adapter_name(name) or len(digest) != ADAPTER_DIGEST_BYTES:
        raise ValueError(f"{raw!r} does not describe an adapter")
    error = _text(raw, "error")[:MAX_ADAPTER_ERROR]
    return WorkerAdapter(name, digest, error, raw["in_settings"] is True)


def _server_api(raw: Any) -> ServerApi:
    """Parse what a server offers. Paths that this version does not know are left out."""
    paths = tuple(path for path in KNOWN_PATHS if path in raw["paths"])
    return ServerApi(_text(raw, "model"), paths)


def _load(raw: Any) -> WorkerLoad:
    return WorkerLoad(
        running=_number(raw, "running"),
        waiting=_number(raw, "waiting"),
        queued_tokens=_number(raw, "queued_tokens"),
        free_blocks=_number(raw, "free_blocks"),
        num_blocks=_number(raw, "num_blocks"),
        at_seconds=_amount(raw, "at_seconds"),
        queue=_queue(raw["queue"]),
        prefill_cost=_optional(raw, "prefill_cost", _prefill_cost),
        prefill_error=_optional(raw, "prefill_error", _amount) if "prefill_error" in raw else None,
        num_first_tokens=_number(raw, "num_first_tokens") if "num_first_tokens" in raw else 0,
        num_late_first_tokens=(
            _number(raw, "num_late_first_tokens") if "num_late_first_tokens" in raw else 0
        ),
        decode_requests=_number(raw, "decode_requests"),
        context_tokens=_number(raw, "context_tokens"),
        promised_tokens=_number(raw, "promised_tokens"),
        decode_cost=_optional(raw, "decode_cost", _decode_cost),
        answer_tokens=_optional(raw, "answer_tokens", _amount),
        short_answer_tokens=_optional(raw, "short_answer_tokens", _amount),
        link_bytes_per_second=_optional(raw, "link_bytes_per_second", _rate),
        window_tokens=_optional(raw, "window_tokens", _number) if "window_tokens" in raw else None,
        windowed_share=_amount(raw, "windowed_share") if "windowed_share" in raw else 1.0,
        prompt_share=min(_amount(raw, "prompt_share"), 1.0) if "prompt_share" in raw else 0.0,
        prompt_slowdown=(
            max(_amount(raw, "prompt_slowdown"), 1.0) if "prompt_slowdown" in raw else 1.0
        ),
        shared_step_seconds=(
            _optional(raw, "shared_step_seconds", _amount) if "shared_step_seconds" in raw else None
        ),
    )


def _queue(raw: Any) -> tuple[QueuedWork, ...]:
    if not isinstance(raw, list) or len(raw) > MAX_QUEUED:
        raise ValueError(f"queue must be a list of at most {MAX_QUEUED} entries")
    return tuple(
        QueuedWork(_optional(entry, "deadline_seconds", _finite), _amount(entry, "work_seconds"))
        for entry in raw
    )


def _prefill_cost(raw: Any, key: str) -> PrefillCost:
    cost = raw[key]
    return PrefillCost(
        fixed_seconds=_amount(cost, "fixed_seconds"),
        per_token_seconds=_amount(cost, "per_token_seconds"),
        per_pair_seconds=_amount(cost, "per_pair_seconds"),
    )


def _decode_cost(raw: Any, key: str) -> DecodeCost:
    """Parse the measured cost of a decode step. The fields of DecodeCost that concern experts are
    not parsed: only simulations use them, and members never send them."""
    cost = raw[key]
    return DecodeCost(
        fixed_seconds=_amount(cost, "fixed_seconds"),
        per_request_seconds=_amount(cost, "per_request_seconds"),
        per_context_token_seconds=_amount(cost, "per_context_token_seconds"),
    )


def _rate(raw: Any, key: str) -> float:
    """Parse a rate. It is used as a divisor, so it must not be close to 0."""
    value = _finite(raw, key)
    if value < MIN_RATE:
        raise ValueError(f"{key} is {value!r}; it must be at least {MIN_RATE:g}")
    return value


def _optional(raw: Any, key: str, read: Callable[[Any, str], T]) -> T | None:
    return None if raw[key] is None else read(raw, key)


def _text(raw: Any, key: str) -> str:
    if not isinstance(raw[key], str):
        raise ValueError(f"{key} is {raw[key]!r}; it must be a string")
    return str(raw[key])


def _hex(raw: Any, key: str) -> str:
    bytes.fromhex(_text(raw, key))
    return _text(raw, key)


def _number(raw: Any, key: str) -> int:
    return _count(raw, key, MAX_NUMBER)


def _count(raw: Any, key: str, most: float) -> int:
    if isinstance(raw[key], bool) or not isinstance(raw[key], int) or not 0 <= raw[key] <= most:
        raise ValueError(f"{key} is {raw[key]!r}; it must be a number from 0 to {most:g}")
    return int(raw[key])


def _finite(raw: Any, key: str) -> float:
    value = raw[key]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= MAX_NUMBER
    ):
        raise ValueError(
            f"{key} is {value!r}; it must be a finite number from {-MAX_NUMBER:g} to {MAX_NUMBER:g}"
        )
    return float(value)


def _amount(raw: Any, key: str) -> float:
    value = _finite(raw, key)
    if value < 0:
        raise ValueError(f"{key} is {value!r}; it must be at least 0")
    return value
