"""Runs a store node without Redis, for benchmarks. Prints its address and its Unix socket."""

import asyncio
import sys
import tempfile
from pathlib import Path

import uvloop

from baton.clock import SystemClock
from baton.core.credentials import ClusterCredentials
from baton.core.ids import Incarnation
from baton.rpc.framed.server import FramedServer
from baton.rpc.kvstore_service import add_kvstore_service, local_kvstore_services
from baton.rpc.server import build_server, listen
from baton.system.host import host_id
from baton.transport.host_memory import HostMemory
from baton.transport.selection import open_transports
from kvstore.disk_tier import DiskTier
from kvstore.dram_tier import DramTier
from kvstore.node import StoreNode


async def serve(arena_bytes: int, disk_bytes: int, folder: Path) -> None:
    clock = SystemClock()
    generation = Incarnation(clock.wall_nanoseconds())
    memory = HostMemory("bench-store", arena_bytes)
    memory.view[:] = bytes(arena_bytes)  # pages are touched before anything is measured
    transports = open_transports(
        (),
        owner="bench-store",
        generation=generation,
        region=memory.region,
        clock=clock,
        listen_host="127.0.0.1",
        nixl_interfaces=("lo",),  # so that it can be reached as if from another host
    )
    disk = DiskTier(folder / "disk", disk_bytes) if disk_bytes else None
    dram_tier = DramTier(arena_bytes)
    node = StoreNode(generation, memory, transports, host_id(), clock, dram_tier, disk)
    server = build_server()
    add_kvstore_service(server, node)
    port = await listen(server, "127.0.0.1", 0)
    path = folder / "sockets" / "node.sock"
    local_server = FramedServer(ClusterCredentials(), local_kvstore_services(node))
    await local_server.listen_locally(path)
    print(f"127.0.0.1:{port} {path}", flush=True)
    demoting = asyncio.create_task(node.demoter.run())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    demoting.cancel()
    await node.demoter.demote_all()
    if disk is not None:
        disk.close()
    await local_server.close()
    await server.stop(grace=None)
    for transport in transports.values():
        transport.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        where = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(name)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(int(sys.argv[1]), int(sys.argv[2]), where))
