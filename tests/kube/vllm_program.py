"""``vllm serve`` in the containers of tests: a fake server that generates tokens without a model.

    python -m tests.kube.vllm_program serve MODEL --host=127.0.0.1 --port=PORT [--token-seconds=S]

On SIGTERM it exits at once, and its running answers break off. Other arguments are ignored.
"""

import argparse
import asyncio
import signal
import sys

from testkit.fakes.vllm_server import FakeVllm


async def serve(model: str, port: int, token_seconds: float) -> None:
    fake = FakeVllm(model)
    fake.token_seconds = token_seconds
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await fake.start(port)
    print(f"vllm serves {model}", flush=True)
    await stopped.wait()
    print(f"vllm got SIGTERM with {fake.num_running} running requests", flush=True)
    await fake.close()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", choices=["127.0.0.1"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    options, _ = parser.parse_known_args(arguments)
    asyncio.run(serve(options.model, options.port, options.token_seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
