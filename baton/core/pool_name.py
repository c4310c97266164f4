"""Names of worker pools. A pool has the workers of one role; if the cluster serves several models,
each model has pools of its own."""

from collections.abc import Iterable

from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS


def pool_name(model: str, role: Role, models: Iterable[str]) -> str:
    """Return the name of the pool of ``model`` and ``role`` in a cluster that serves ``models``:
    ``decode``, or ``MODEL/decode`` if there are several models."""
    return role.value if set(models) <= {model} else f"{model}/{role.value}"


def pool_names(models: Iterable[str]) -> dict[str, tuple[str, Role]]:
    """Return the model and the role of each pool in a cluster that serves ``models``, by the pool's
    name."""
    served = list(models)
    return {
        pool_name(model, role, served): (model, role) for model in served for role in WORKER_KINDS
    }
