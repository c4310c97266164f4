"""Combines the groups of settings into the settings of all programs."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import PrivateAttr
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from baton.checkpoints.hub import short_name
from baton.config.autoscaling_settings import AutoscalingSettings
from baton.config.cluster_settings import ClusterSettings
from baton.config.router_settings import RouterSettings
from baton.config.sources import (
    ConfigFile,
    SecretFiles,
    environment_values,
    variable_name,
)
from baton.config.values import MODEL_NAME
from baton.config.worker_settings import WorkerSettings
from baton.core.credentials import ClusterCredentials
from baton.core.kv_codec import KvCodecName
from baton.errors import Invalid
from baton.system.process_environment import ENVIRONMENT_PREFIX

LOOPBACK = ("127.0.0.1", "::1", "localhost")
SECRET_SETTINGS = {
    "cluster_secret",
    "api_keys",
    "admin_key",
    "tenant_secret",
    "redis_url",
    "redis_password",
}
"""Settings whose values error messages never show."""


class Settings(RouterSettings, WorkerSettings, AutoscalingSettings, ClusterSettings, BaseSettings):
    """The settings of all programs; they are frozen. Build them with
    :func:`baton.config.load_settings`, whose errors explain wrong values."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True, protected_namespaces=()
    )

    _flags: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    _secret_files: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def flags(self) -> Mapping[str, Any]:
        """The settings that were given on the command line, as they were given."""
        return self._flags

    @property
    def secret_files(self) -> frozenset[str]:
        """The names of the settings that were in the folder of secret files."""
        return self._secret_files

    @property
    def has_server_workers(self) -> bool:
        """True if workers hand requests to inference servers, and have no engine themselves."""
        return bool(self.attach) or self.engine == "vllm"

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or short_name(self.model)

    @property
    def served_models(self) -> Mapping[str, str]:
        """The folders (or ids on the Hugging Face hub) of all models that the cluster serves, by
        their names in the API. The first model is the default."""
        return self.models or {self.model_name: self.model}

    def for_model(self, name: str) -> "Settings":
        """Return the settings of the workers of one of the ``served_models``."""
        model = {"model": self.served_models[name], "served_model_name": name, "models": {}}
        return self.model_copy(update=model | {"adapters": self._adapters_of(name)})

    @property
    def own_adapters(self) -> Mapping[str, str]:
        """The folders of the LoRA adapters of this worker's model, by their names."""
        return self._adapters_of(self.model_name)

    @property
    def adapter_folders(self) -> Mapping[str, tuple[str, str]]:
        """The model and the folder of each of the ``adapters``. A folder may be given as
        MODEL:FOLDER; without a model, the adapter is one of the first model's."""
        first = next(iter(self.served_models))
        folders: dict[str, tuple[str, str]] = {}
        for name, value in self.adapters.items():
            model, colon, folder = value.partition(":")
            named = colon and re.fullmatch(MODEL_NAME, model)
            folders[name] = (model, folder) if named else (first, value)
        return folders

    def _adapters_of(self, model: str) -> Mapping[str, str]:
        return {
            name: folder for name, (base, folder) in self.adapter_folders.items() if base == model
        }

    def accepted_hosts(self, host: str) -> tuple[str, ...] | None:
        """Return the names that a server listening at ``host`` accepts in the ``Host`` header of a
        request. The names of loopback, such as localhost, are always accepted, and are not
        returned. None means that any name is accepted."""
        if "*" in self.allowed_hosts or not (self.allowed_hosts or host in LOOPBACK):
            return None
        return (*self.allowed_hosts, *filter(None, [self.advertise_address]))

    @property
    def uses_kv_codecs(self) -> bool:
        """True if workers may encode or decode KV blocks."""
        return any(codec is not KvCodecName.NONE for codec in self._kv_codecs)

    @property
    def has_lossy_kv_codec(self) -> bool:
        """True if KV may pass a lossy codec, unless a request asks for exact KV."""
        return any(codec.is_lossy for codec in self._kv_codecs)

    @property
    def _kv_codecs(self) -> tuple[KvCodecName, ...]:
        return self.kv_codec_wire, self.kv_codec_store, self.kv_codec_disk

    @property
    def staging_bytes(self) -> int | None:
        """The size of a KV pool's staging area; None: chosen from the size of the pool."""
        if self.kv_staging_bytes is None and not self.uses_kv_codecs:
            return 0
        return self.kv_staging_bytes

    @property
    def trust(self) -> ClusterCredentials:
        """The credentials by which members of the cluster authenticate each other."""
        return ClusterCredentials(
            self.cluster_secret,
            self.rpc_tls_certificate or "",
            self.rpc_tls_key or "",
            self.rpc_tls_ca or "",
        )

    @property
    def required_redis_url(self) -> str:
        """``redis_url``, for a program that can't run without it. Raises Invalid if it is not
        set."""
        if not self.redis_url:
            raise Invalid("redis_url is not set; set it, e.g. BATON_REDIS_URL=redis://HOST:PORT/0")
        return self.redis_url

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order of precedence: flags, then the environment, then secret
        files, then the YAML file."""
        assert isinstance(env_settings, EnvSettingsSource)
        env_settings.env_vars = {
            variable_name(name).lower(): value for name, value in environment_values().items()
        }
        return init_settings, env_settings, SecretFiles(settings_cls), ConfigFile(settings_cls)
