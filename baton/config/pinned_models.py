"""Fixes the commits of a cluster's models on the Hugging Face hub."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from baton.checkpoints.hub import pin_model
from baton.config import Settings


def pin_models(settings: Settings) -> Settings:
    """Return the settings with the commit of each hub model, ``owner/name@COMMIT``, so that all
    processes with these settings use the same files, and need no hub once these are in the cache.
    Downloads what is not there. Blocks; raises the errors of
    :func:`baton.checkpoints.hub.resolve_model`."""
    draft = settings.draft_model
    models = sorted({*settings.served_models.values()} | ({draft} if draft else set()))
    with ThreadPoolExecutor(len(models)) as pool:
        pinned = dict(zip(models, pool.map(pin_model, models), strict=True))
    update: dict[str, Any] = {"draft_model": pinned[draft] if draft else None}
    if settings.models:
        update["models"] = {name: pinned[model] for name, model in settings.models.items()}
    else:
        update["model"] = pinned[settings.model]
    return settings.model_copy(update=update)
