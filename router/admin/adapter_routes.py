"""Admin routes that load and unload LoRA adapters at run time, and vLLM's names for them."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from baton.core.adapter import AdapterEntry, is_adapter_name
from router.admin.routes import check_admin, read_json_object
from router.errors import ApiError
from router.generation.adapter_directory import AdapterDirectory, ServedAdapter
from router.openai.context import RouterContext

LOADING_SECONDS = 0.1
MAX_LOADING_SECONDS = 30.0
"""How long a request to load an adapter waits until a worker has loaded it."""

MAX_REMOVAL_SECONDS = 5.0
"""How long such a request, or one to unload an adapter, waits until no worker announces the removed
adapter any more. Workers stop announcing it within a second or two."""


def add_adapter_routes(app: FastAPI, context: RouterContext, adapters: AdapterDirectory) -> None:
    """Add the routes. A request to load an adapter validates it here, and adds it to the registry,
    from which all workers of its model load it. It returns when the first worker has loaded or
    refused it, or after ``MAX_LOADING_SECONDS``."""

    @app.get("/admin/adapters")
    async def list_adapters(request: Request) -> Response:
        check_admin(context, request)
        await adapters.refresh()
        return _json({"adapters": [describe_adapter(each) for each in adapters.list()]})

    @app.post("/admin/adapters")
    async def load(request: Request) -> Response:
        check_admin(context, request)
        body = await read_json_object(request)
        model = body.pop("model", None)
        name, path = _fields(body, "name", "path")
        return _json(describe_adapter(await load_adapter(name, path, model)))

    @app.delete("/admin/adapters/{name:path}")
    async def unload(request: Request, name: str) -> Response:
        check_admin(context, request)
        await unload_adapter(name)
        return _json({"name": name, "deleted": True})

    @app.post("/v1/load_lora_adapter")
    async def load_as_vllm(request: Request) -> Response:
        check_admin(context, request)
        name, path = _fields(await read_json_object(request), "lora_name", "lora_path")
        await load_adapter(name, path)
        return _text(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_as_vllm(request: Request) -> Response:
        check_admin(context, request)
        (name,) = _fields(await read_json_object(request), "lora_name")
        await unload_adapter(name)
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")

    async def load_adapter(name: str, path: str, model: Any = None) -> ServedAdapter:
        _check_name(context, name)
        base = context.models.all[0].name if model is None else model
        if base not in [each.name for each in context.models.all]:
            raise ApiError(400, f"the model {base!r} does not exist", param="model")
        if not Path(path).is_absolute():
            raise ApiError(400, "the path must be absolute, and valid on every worker")
        digest = await asyncio.to_thread(adapters.read_digest, base, Path(path))
        await wait_until_removed(name)
        await adapters.registry.put_adapter(AdapterEntry(name, path, digest, base))
        return await wait_until_loaded(name, digest)

    async def wait_until_removed(name: str) -> None:
        """If the adapter was removed a moment ago, wait until no worker announces it any more.
        Otherwise it would count as loaded at once, and a worker that does not know of the removal
        would write it again if Redis lost its data."""
        give_up_at = context.clock.monotonic() + MAX_REMOVAL_SECONDS
        while adapters.is_outdated(name) and context.clock.monotonic() < give_up_at:
            await context.clock.sleep(LOADING_SECONDS)
            await adapters.refresh()

    async def wait_until_loaded(name: str, digest: bytes) -> ServedAdapter:
        give_up_at = context.clock.monotonic() + MAX_LOADING_SECONDS
        while True:
            await adapters.refresh()
            served = adapters.find(name)
            if served is None:
                raise ApiError(409, f"the adapter {name} was removed meanwhile")
            is_loaded = served.ref.digest == digest and served.loaded_on
            if is_loaded or served.errors or context.clock.monotonic() >= give_up_at:
                return served
            await context.clock.sleep(LOADING_SECONDS)

    async def unload_adapter(name: str) -> None:
        served = adapters.find(name)
        removed = await adapters.registry.remove_adapter(name)
        await adapters.refresh()
        if not removed and served is not None and served.entry is None:
            raise ApiError(
                409, f"the adapter {name} is in the setting `adapters`, so it can't be unloaded"
            )
        if not removed:
            raise ApiError(404, f"there is no adapter {name}")
        await wait_until_removed(name)


def describe_adapter(adapter: ServedAdapter) -> dict[str, Any]:
    return {
        "name": adapter.ref.name,
        "model": adapter.model,
        "path": None if adapter.entry is None else adapter.entry.path,
        "digest": adapter.ref.digest.hex(),
        "loaded_on": adapter.loaded_on,
        "errors": adapter.errors,
    }


def _check_name(context: RouterContext, name: str) -> None:
    if not is_adapter_name(name):
        raise ApiError(
            400,
            "the name must begin with a letter, a digit or _, and have at most 128 characters of "
            "A-Za-z0-9_.:/@+-",
            param="name",
        )
    if any(name in (model.name, *model.aliases) for model in context.models.all):
        raise ApiError(400, f"{name} is the name of a model", param="name")


def _fields(body: dict[str, Any], *names: str) -> list[str]:
    if body.keys() != set(names) or not all(isinstance(body[name], str) for name in names):
        example = ", ".join(f'"{name}": "…"' for name in names)
        raise ApiError(400, f"the body must be like {{{example}}}")
    return [body[name] for name in names]


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain")
