"""``vllm serve`` in the containers of tests: a fake server that generates tokens without a model.

    python -m tests.kube.vllm_program serve MODEL --host=127.0.0.1 --port=PORT [--token-seconds=S]

It publishes what it has cached where ``--kv-events-config`` says. With ``--kv-transfer-config`` it
exchanges KV with others, which read what it lends at the address of its side channel. On SIGTERM it
exits at once, and its running answers break off. Other arguments are ignored.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from testkit.fakes.kv_events import FakeKvEvents
from testkit.fakes.vllm_server import FakeVllm


async def serve(options: argparse.Namespace) -> None:
    fake = FakeVllm(options.model)
    fake.events = FakeKvEvents(
        Path(options.kv_events_config["endpoint"].removeprefix("ipc://")).parent
    )
    assert options.kv_events_config == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": fake.events.events,
        "replay_endpoint": fake.events.replay,
    }
    fake.token_seconds = options.token_seconds
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    if options.kv_transfer_config is not None:
        assert options.kv_transfer_config["kv_connector"] == "NixlConnector"
        await lend_kv(fake)
    await fake.start(options.port)
    print(f"vllm serves {options.model}", flush=True)
    await stopped.wait()
    print(f"vllm got SIGTERM with {fake.num_running} running requests", flush=True)
    await fake.close()


async def lend_kv(fake: FakeVllm) -> None:
    """Let the servers of other pods read the KV that the fake lends, and log each read."""
    host = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    fake.lends_kv = True
    fake.kv.address = (host, port)
    fake.kv.engine_id = f"{host}:{port}"

    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tokens = fake.kv.lent.pop((await reader.readline()).decode().strip())
        writer.write(json.dumps(tokens).encode())
        print(f"{writer.get_extra_info('peername')[0]} read {len(tokens)} tokens", flush=True)
        writer.close()

    await asyncio.start_server(give, host, port)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", choices=["127.0.0.1"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-events-config", type=json.loads, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    options, _ = parser.parse_known_args(arguments)
    asyncio.run(serve(options))


if __name__ == "__main__":
    main(sys.argv[1:])
