"""A separate process that serves a memory region, for tests of a transport's reader.

    python -m testkit.transport_peer NAME SIZE GENERATION [NIXL_INTERFACE]

Fills a region of SIZE bytes with a pattern, serves it with the transport NAME, prints its endpoint
as a line of JSON, and runs until its standard input ends. GENERATION is the number of this
incarnation of the peer, which increases with each restart; the pattern depends on it.
"""

import base64
import json
import sys
from dataclasses import asdict

import numpy as np

from baton.clock import SystemClock
from baton.config import load_settings
from baton.core.kv_transfer import Endpoint
from baton.transport.host_memory import HostMemory
from baton.transport.selection import open_transports


def pattern(size_bytes: int, generation: int) -> np.ndarray:
    return np.random.default_rng(generation).integers(256, size=size_bytes, dtype=np.uint8)


def endpoint_from_json(line: str) -> Endpoint:
    fields = json.loads(line)
    return Endpoint(**{**fields, "metadata": base64.b64decode(fields["metadata"])})


def endpoint_to_json(endpoint: Endpoint) -> str:
    fields = asdict(endpoint)
    return json.dumps({**fields, "metadata": base64.b64encode(endpoint.metadata).decode()})


def main(name: str, size_bytes: int, generation: int, *interfaces: str) -> None:
    load_settings()  # BATON_PORTABLE chooses the facilities
    memory = HostMemory("peer", size_bytes)
    np.frombuffer(memory.view, dtype=np.uint8)[:] = pattern(size_bytes, generation)
    opened = open_transports(
        [name],
        owner="peer",
        generation=generation,
        region=memory.region,
        clock=SystemClock(),
        listen_host="127.0.0.1",
        nixl_interfaces=interfaces,
    )
    (transport,) = opened.values()
    print(endpoint_to_json(transport.export()), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
