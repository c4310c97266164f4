"""A proxy before a prefill and a decode server of vLLM, as small as the examples that vLLM's users
start from: FastAPI, httpx, two requests for each, and nothing that survives a fault.

    python -m benchmarks.vllm.proxy --prefill URL --decode URL --port PORT
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


def build(prefill: str, decode: str) -> FastAPI:
    """Return the application; ``prefill`` and ``decode`` are the URLs of the servers."""
    limits = httpx.Limits(max_connections=None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        client: httpx.AsyncClient = request.app.state.client
        body = await request.json()
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": wanted}
        first.pop("stream_options", None)
        response = await client.post(f"{prefill}/v1/completions", json=first)
        response.raise_for_status()
        body["kv_transfer_params"] = response.json()["kv_transfer_params"]

        async def answer() -> AsyncIterator[bytes]:
            async with client.stream("POST", f"{decode}/v1/completions", json=body) as stream:
                async for data in stream.aiter_bytes():
                    yield data

        return StreamingResponse(answer(), media_type="text/event-stream")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    app = build(options.prefill, options.decode)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
