"""Loads and unloads LoRA adapters on all workers of a model, for the admin routes."""

import asyncio
from pathlib import Path
from typing import Any

from baton.core.adapter import AdapterEntry, is_adapter_name
from router.errors import ApiError
from router.generation.adapter_directory import AdapterDirectory, ServedAdapter
from router.limits import MAX_LOADING_SECONDS, MAX_REMOVAL_SECONDS
from router.serving.context import RouterContext

POLL_SECONDS = 0.1


class AdapterLoader:
    """Adds adapters to the registry, from which all workers of their model load them, and removes
    them. All methods raise ApiError for a request that can't be carried out."""

    def __init__(self, context: RouterContext, adapters: AdapterDirectory) -> None:
        self._models = context.models
        self._clock = context.clock
        self._adapters = adapters

    async def load(self, name: str, path: str, model: Any = None) -> ServedAdapter:
        """Validate an adapter here and add it to the registry, for ``model`` or else the first
        model. Returns when the first worker has loaded or refused it, or after
        ``MAX_LOADING_SECONDS``."""
        self._check_name(name)
        base = self._models.all[0].name if model is None else model
        if base not in [each.name for each in self._models.all]:
            raise ApiError(400, f"the model {base!r} does not exist", param="model")
        if not Path(path).is_absolute():
            raise ApiError(400, "the path must be absolute, and valid on every worker")
        digest = await asyncio.to_thread(self._adapters.read_digest, base, Path(path))
        await self._wait_until_removed(name)
        await self._adapters.registry.put_adapter(AdapterEntry(name, path, digest, base))
        return await self._wait_until_loaded(name, digest)

    async def unload(self, name: str) -> None:
        """Remove an adapter from the registry. Returns when no worker announces it any more, or
        after ``MAX_REMOVAL_SECONDS``."""
        served = self._adapters.find(name)
        removed = await self._adapters.registry.remove_adapter(name)
        await self._adapters.refresh()
        if not removed and served is not None and served.entry is None:
            raise ApiError(
                409, f"the adapter {name} is in the setting `adapters`, so it can't be unloaded"
            )
        if not removed:
            raise ApiError(404, f"there is no adapter {name}")
        await self._wait_until_removed(name)

    def _check_name(self, name: str) -> None:
        if not is_adapter_name(name):
            raise ApiError(
                400,
                "the name must begin with a letter, a digit or _, and have at most 128 characters "
                "of A-Za-z0-9_.:/@+-",
                param="name",
            )
        if any(name in (model.name, *model.aliases) for model in self._models.all):
            raise ApiError(400, f"{name} is the name of a model", param="name")

    async def _wait_until_removed(self, name: str) -> None:
        """If the adapter was removed a moment ago, wait until no worker announces it any more.
        Otherwise it would count as loaded at once, and a worker that does not know of the removal
        would write it again if Redis lost its data."""
        give_up_at = self._clock.monotonic() + MAX_REMOVAL_SECONDS
        while self._adapters.is_outdated(name) and self._clock.monotonic() < give_up_at:
            await self._clock.sleep(POLL_SECONDS)
            await self._adapters.refresh()

    async def _wait_until_loaded(self, name: str, digest: bytes) -> ServedAdapter:
        give_up_at = self._clock.monotonic() + MAX_LOADING_SECONDS
        while True:
            await self._adapters.refresh()
            served = self._adapters.find(name)
            if served is None:
                raise ApiError(409, f"the adapter {name} was removed meanwhile")
            is_loaded = served.ref.digest == digest and served.loaded_on
            if is_loaded or served.errors or self._clock.monotonic() >= give_up_at:
                return served
            await self._clock.sleep(POLL_SECONDS)
