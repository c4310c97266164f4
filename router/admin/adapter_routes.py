"""Admin routes that load and unload LoRA adapters at run time, and vLLM's names for them."""

from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from router.admin.adapter_loader import AdapterLoader
from router.admin.routes import check_admin, read_json_object
from router.errors import ApiError
from router.generation.adapter_directory import AdapterDirectory, ServedAdapter
from router.serving.context import RouterContext


def add_adapter_routes(app: FastAPI, context: RouterContext, adapters: AdapterDirectory) -> None:
    loader = AdapterLoader(context, adapters)

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
        return _json(describe_adapter(await loader.load(name, path, model)))

    @app.delete("/admin/adapters/{name:path}")
    async def unload(request: Request, name: str) -> Response:
        check_admin(context, request)
        await loader.unload(name)
        return _json({"name": name, "deleted": True})

    @app.post("/v1/load_lora_adapter")
    async def load_as_vllm(request: Request) -> Response:
        check_admin(context, request)
        name, path = _fields(await read_json_object(request), "lora_name", "lora_path")
        await loader.load(name, path)
        return _text(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_as_vllm(request: Request) -> Response:
        check_admin(context, request)
        (name,) = _fields(await read_json_object(request), "lora_name")
        await loader.unload(name)
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")


def describe_adapter(adapter: ServedAdapter) -> dict[str, Any]:
    return {
        "name": adapter.ref.name,
        "model": adapter.model,
        "path": None if adapter.entry is None else adapter.entry.path,
        "digest": adapter.ref.digest.hex(),
        "loaded_on": adapter.loaded_on,
        "errors": adapter.errors,
    }


def _fields(body: dict[str, Any], *names: str) -> list[str]:
    if body.keys() != set(names) or not all(isinstance(body[name], str) for name in names):
        example = ", ".join(f'"{name}": "…"' for name in names)
        raise ApiError(400, f"the body must be like {{{example}}}")
    return [body[name] for name in names]


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain")
