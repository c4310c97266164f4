"""Types of settings: how each is parsed from text, and which values are valid.

Each parser takes the value of a flag, an environment variable or a YAML file, and raises a
ValueError that says what would be valid.
"""

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_settings import NoDecode

from baton.core.adapter import MAX_ADAPTER_NAME, is_adapter_name
from baton.core.kv_codec import KvCodecName
from baton.core.prefill_order import PREFILL_ORDERS
from baton.core.worker_kinds import WORKER_KINDS

MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Matches the name of one of several models."""

TRANSPORTS = ("shm", "cuda_ipc", "nixl", "grpc")

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def _size(value: Any) -> Any:
    """Parse a number of bytes, given as a number or as text like ``512MiB``."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+)\s*([KMG]?I?)B?", value.strip().upper())
    if match is None:
        raise ValueError("it must be a number of bytes, like 536870912 or 512MiB")
    return int(match[1]) * _SUFFIXES[match[2]]


def _names(value: Any) -> Any:
    """Parse a comma-separated list of names."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _transports(value: Any) -> Any:
    """Parse a list of transports; ``auto`` becomes the empty list."""
    names = _names(value)
    if names in (("auto",), ["auto"]):
        return ()
    if isinstance(names, (tuple, list)):
        for name in names:
            if name not in TRANSPORTS:
                raise ValueError(f"it must be auto, or one or more of {','.join(TRANSPORTS)}")
    return names


def _switch(value: Any) -> Any:
    """Turn booleans into ``on`` and ``off``, since YAML reads these two words as booleans."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _known_order(value: str) -> str:
    if value not in PREFILL_ORDERS:
        raise ValueError(f"it must be one of {', '.join(PREFILL_ORDERS)}")
    return value


def _reachable_ray(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"([^\s/:]+|\[[0-9a-fA-F:]+\]):\d{1,5}", value):
        raise ValueError("it must be auto, or HOST:PORT of a running Ray")
    return value


def _collector_url(value: str) -> str:
    if not re.fullmatch(r"https?://([^\s/:@]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?/?", value):
        raise ValueError(
            "it must be the URL of an OTLP/gRPC collector, like http://collector:4317, or of an "
            "OTLP/HTTP one, like http://collector:4318, without a path"
        )
    return value


def _pairs(value: Any) -> Any:
    """Parse a mapping from JSON, or from text like ``key=value,key2=value2``."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"it must be a JSON object or key=value,…: {error}") from error
    pairs = [part.partition("=") for part in _names(value)]
    if not all(key and tenant for key, _, tenant in pairs):
        raise ValueError("it must look like key=value,key2=value2")
    return {key: tenant for key, _, tenant in pairs}


def _origins(value: Any) -> Any:
    """Parse origins of web pages, as browsers write them; ``*`` means all, and ``null`` those of
    pages that have none."""
    names = _names(value)
    for name in names if isinstance(names, (tuple, list)) else ():
        if not re.fullmatch(r"\*|null|file://|[a-z][a-z0-9+.-]*://[^/\s?#]+", str(name)):
            raise ValueError(
                "it must be *, null, or origins like https://chat.example.com, without a path"
            )
    return names


def _hosts(value: Any) -> Any:
    """Parse host names and addresses, as in a request's Host header but without a port; ``*``
    means all."""
    names = _names(value)
    for name in names if isinstance(names, (tuple, list)) else ():
        if name != "*" and not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", str(name)):
            raise ValueError("it must be *, or names like baton.example.com, without a port")
    return names


def _check_model_names(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not re.fullmatch(MODEL_NAME, name):
            raise ValueError(
                "a model's name must be at most 64 letters, digits, dots, underscores and hyphens, "
                f"which {name!r} is not; in NAME=PATH, the name is what is before the first ="
            )
    return value


def _check_pool_targets(value: dict[str, str]) -> dict[str, str]:
    for pool, target in value.items():
        role, _, deployment = target.partition("/")
        if role not in WORKER_KINDS or not re.fullmatch(
            r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", deployment
        ):
            raise ValueError(
                "it must look like POOL=ROLE/DEPLOYMENT, as in decode-big=decode/baton-decode-big;"
                f" {pool}={target} does not"
            )
    return value


def _check_adapters(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not is_adapter_name(name):
            raise ValueError(
                "an adapter's name must begin with a letter, a digit or _, and have at most "
                f"{MAX_ADAPTER_NAME} characters of A-Za-z0-9_.:/@+-; {name!r} does not"
            )
    return value


AsSize, AsSwitch = BeforeValidator(_size), BeforeValidator(_switch)
"""For types with additional constraints, such as a minimum."""

Size = Annotated[int, AsSize, Field(gt=0)]
SizeOrZero = Annotated[int, AsSize, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]
KvCodec = Annotated[
    KvCodecName, WithJsonSchema({"type": "string", "enum": [name.value for name in KvCodecName]})
]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
PrefillOrderName = Annotated[str, AfterValidator(_known_order)]
RayAddress = Annotated[str, AfterValidator(_reachable_ray)]
CollectorUrl = Annotated[str, AfterValidator(_collector_url)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]
Transports = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_transports)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_origins)]
Hosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_hosts)]
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)]
Adapters = Annotated[Pairs, AfterValidator(_check_adapters)]
Counts = Annotated[dict[str, Annotated[int, Field(ge=0)]], NoDecode, BeforeValidator(_pairs)]
ModelPaths = Annotated[Pairs, AfterValidator(_check_model_names)]
PoolTargets = Annotated[Pairs, AfterValidator(_check_pool_targets)]
