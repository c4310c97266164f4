"""Options that several commands share, and how they become settings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.checkpoints.hub import short_name
from baton.errors import Invalid

if TYPE_CHECKING:
    from baton.config import Settings

Name = Annotated[
    str | None, typer.Option(help="Name of the cluster. Default: BATON_CLUSTER, else 'default'.")
]
Config = Annotated[Path | None, typer.Option(help="A YAML file of settings.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return without waiting for the result.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, or cuda.")]
DType = Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Give bit-identical output in any batch; don't start if that is impossible.",
    ),
]
ModelPath = Annotated[
    str | None, typer.Option(help="Model directory, or Hugging Face hub id (owner/name@REVISION).")
]


_NAMED_MODEL = r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)"


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Options for the device and the number formats of the engine."""

    device: Device = None
    dtype: DType = None
    quantization: Annotated[
        str | None, typer.Option(help="Format of the weights: none, fp8; on a CPU also int8, int4.")
    ] = None
    deterministic: Deterministic = False

    @property
    def settings(self) -> dict[str, Any]:
        return {**vars(self), "deterministic": self.deterministic or None}


@dataclass(frozen=True, kw_only=True)
class SettingSources:
    """The sources of settings other than a command's own flags."""

    config: Config = None
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting, by name. Repeatable."),
    ] = None

    def load(self, flags: dict[str, Any]) -> "Settings":
        """Load the settings. Flags that are not None override the other sources. Raises Invalid."""
        from baton.config import load_settings

        return load_settings(self.config, **self.merge(flags))

    def merge(self, flags: dict[str, Any]) -> dict[str, Any]:
        """Merge flags with ``--set`` pairs; a setting's own flag overrides its ``--set``."""
        given = {name: value for name, value in flags.items() if value is not None}
        return {**_parse_pairs(self.set_ or []), **given}


@dataclass(frozen=True, kw_only=True)
class TargetCluster:
    """The cluster that a command applies to: one started by ``baton up``, or one in Kubernetes."""

    on: Annotated[
        str,
        typer.Option(
            "--on", help="cluster (started by `baton up`) or kubernetes.", metavar="WHERE"
        ),
    ] = "cluster"
    namespace: Annotated[
        str | None, typer.Option(help="Kubernetes namespace. Default: the current one.")
    ] = None
    name: Name = None
    config: Config = None

    @property
    def is_kubernetes(self) -> bool:
        """Whether the cluster is in Kubernetes. Raises Invalid for an unknown ``--on``."""
        if self.on not in ("cluster", "local", "ray", "kubernetes"):
            raise Invalid(
                f"--on {self.on}: it must be cluster (started by `baton up`) or kubernetes"
            )
        return self.on == "kubernetes"

    @property
    def kubernetes_settings(self) -> "Settings":
        """The settings of the cluster that the options name. If the options name another cluster or
        namespace than the environment (in a conductor's container, for example),
        ``kubernetes_pools`` is emptied, since it lists the pools of the environment's cluster."""
        from baton.config import load_settings

        own = load_settings(self.config)
        named = load_settings(self.config, cluster=self.name, kubernetes_namespace=self.namespace)
        if (own.cluster, own.kubernetes_namespace) == (named.cluster, named.kubernetes_namespace):
            return named
        return named.model_copy(update={"kubernetes_pools": {}})


def model_settings(models: Sequence[str]) -> dict[str, Any]:
    """Return the settings for the models on the command line, each of which is a path or
    NAME=PATH. Raises Invalid if two models have the same name."""
    if not models:
        return {"model": None}
    if len(models) == 1 and not re.match(_NAMED_MODEL, models[0]):
        return {"model": models[0], "models": {}}
    named: dict[str, str] = {}
    for model in models:
        match = re.match(_NAMED_MODEL, model)
        name, path = (match[1], match[2]) if match else (short_name(model), model)
        if name in named:
            raise Invalid(
                f"two models are named {name!r}: give one of them another name, as in "
                f"--model NAME={path}"
            )
        named[name] = path
    return {"model": None, "models": named}


def cluster_name(name: str | None) -> str:
    """Return ``name``, or if it is None, the name of the cluster in the settings."""
    from baton.config import load_settings

    return load_settings(cluster=name).cluster


def _parse_pairs(pairs: list[str]) -> dict[str, Any]:
    """Return the ``--set NAME=VALUE`` pairs as settings. Raises Invalid for a pair of another
    form."""
    parts = [pair.partition("=") for pair in pairs]
    for name, equals, _ in parts:
        if not equals or not name:
            raise Invalid(f"--set takes NAME=VALUE, not {name!r}")
    return {name.replace("-", "_"): value for name, _, value in parts}
