"""Identities. Each is a NewType, so that a checker catches one used for another."""

import re
from typing import NewType

RequestId = NewType("RequestId", str)
"""One request of one client; unique in the cluster for as long as anything remembers it."""

WorkerId = NewType("WorkerId", str)
"""A worker's name, e.g. ``prefill-0``. It outlives a restart; the generation does not. In
Kubernetes it is ``POD.UID``: names of pods are used again."""

Incarnation = NewType("Incarnation", int)
"""Distinguishes the lives of one worker: nanoseconds since 1970 at its start."""

Epoch = NewType("Epoch", int)
"""Counts the placements of one request, from 1. What arrives with an older one is dropped."""

TenantId = NewType("TenantId", str)

BlockId = NewType("BlockId", int)
"""Index of a block in one pool: 0 <= id < num_blocks."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes that name the content of a full block and of everything before it."""

TokenId = NewType("TokenId", int)

_POD_ID = re.compile(r"(.+)\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def display_name(worker_id: str) -> str:
    """As people say it: a pod by its name."""
    found = _POD_ID.fullmatch(worker_id)
    return found[1] if found else worker_id
