"""Identities. Each is a NewType, so that a checker catches one used for another."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One request of one client; unique in the cluster for as long as anything remembers it."""

WorkerId = NewType("WorkerId", str)
"""A worker's name, e.g. ``prefill-0``. It outlives a restart; the generation does not."""

Generation = NewType("Generation", int)
"""Distinguishes the lives of one worker: nanoseconds since 1970 at its start."""

Epoch = NewType("Epoch", int)
"""Counts the placements of one request, from 1. What arrives with an older one is dropped."""

TenantId = NewType("TenantId", str)

BlockId = NewType("BlockId", int)
"""Index of a block in one pool: 0 <= id < num_blocks."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes that name the content of a full block and of everything before it."""

TokenId = NewType("TokenId", int)
