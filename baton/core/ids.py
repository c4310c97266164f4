"""Identifiers. Each is a NewType, so that the type checker notices when they are mixed up."""

import re
from typing import NewType

RequestId = NewType("RequestId", str)
"""One request of one client; unique in the cluster for as long as any program remembers it."""

WorkerId = NewType("WorkerId", str)
"""A worker's name, e.g. ``prefill-0``. It survives a restart; the generation changes. In Kubernetes
it is ``POD.UID``, since names of pods are reused."""

Incarnation = NewType("Incarnation", int)
"""A worker's generation: distinguishes processes that ran under one id. Nanoseconds since 1970 at
the process's start."""

Epoch = NewType("Epoch", int)
"""Counts the placements of one request, from 1. Messages with an older epoch are dropped."""

TenantId = NewType("TenantId", str)

NO_TENANT = TenantId("")

BlockId = NewType("BlockId", int)
"""Index of a block in one pool: 0 <= id < num_blocks."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes that identify the content of a full block and of all blocks before it."""

TokenId = NewType("TokenId", int)

_POD_ID = re.compile(r"(.+)\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def display_name(worker_id: str) -> str:
    """Return the human-readable form of a worker's id: for a pod, its name without the UID."""
    match = _POD_ID.fullmatch(worker_id)
    return match[1] if match else worker_id
