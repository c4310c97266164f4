"""Parses the tenants file (YAML). Every field is checked, since a typo could grant access."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from baton.core.api_key import parse_hashed_api_key
from baton.core.ids import TenantId
from baton.core.priority import Priority
from baton.errors import Invalid
from router.limits import MAX_KEYS_PER_TENANT, MAX_MODELS_PER_TENANT, MAX_TENANTS_FILE_BYTES
from router.tenants.tenant import Tenant, TenantLimits, TokenPrices
from router.tenants.tenant_directory import TenantDirectory, build_tenant_directory

TENANT_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
"""Names appear in metrics, logs and usage, so they contain nothing that must be escaped there."""


def _priority(value: Any) -> Any:
    names = {each.name.lower(): each for each in (Priority.HIGH, Priority.NORMAL, Priority.LOW)}
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"a priority must be one of {', '.join(names)}")
    return names[value]


def _key(value: Any) -> Any:
    """Parse a hashed key. An invalid value is not shown, since it may be a key in plain text."""
    digest = parse_hashed_api_key(value) if isinstance(value, str) else None
    if digest is None:
        raise ValueError("an API key must look like sha256:HEX, as `baton key hash` prints it")
    return digest


Limit = Annotated[int, Field(ge=1, le=10**12)] | None
Price = Annotated[float, Field(ge=0, le=10**9)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class _StrictSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _LimitsSchema(_StrictSchema):
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    concurrent_requests: Limit = None
    files: Limit = None
    file_bytes: Limit = None
    uploads_per_minute: Limit = None
    concurrent_uploads: Limit = None


class _PricesSchema(_StrictSchema):
    input: Price = 0.0
    cached: Price | None = None
    output: Price = 0.0


class _TenantDefaults(_StrictSchema):
    """The fields that a tenant may leave out. Missing fields are taken from ``defaults`` in the
    tenants file; fields that are missing there too have the values below."""

    priority: Annotated[Priority, BeforeValidator(_priority)] = Priority.NORMAL
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    limits: _LimitsSchema = Field(default_factory=_LimitsSchema)
    prices: _PricesSchema = Field(default_factory=_PricesSchema)
    strict_fields: bool | None = None
    exact_kv: bool = False
    models: (
        Annotated[list[ModelName], Field(min_length=1, max_length=MAX_MODELS_PER_TENANT)] | None
    ) = None


class _TenantSchema(_TenantDefaults):
    keys: Annotated[
        list[Annotated[bytes, BeforeValidator(_key)]],
        Field(max_length=MAX_KEYS_PER_TENANT, repr=False),
    ] = Field(default_factory=list)
    salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class _TenantsFileSchema(_StrictSchema):
    defaults: _TenantDefaults = Field(default_factory=_TenantDefaults)
    tenants: dict[Annotated[str, Field(pattern=TENANT_NAME_PATTERN)], _TenantSchema]


def load_tenants_file(path: Path) -> TenantDirectory:
    """Load the tenants file. Raises Invalid; the message names the file, the tenant, the field, and
    what would be valid."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TENANTS_FILE_BYTES + 1)
    except OSError as error:
        raise Invalid(f"tenants file {path}: {error.strerror or error}") from error
    if len(data) > MAX_TENANTS_FILE_BYTES:
        raise Invalid(
            f"tenants file {path}: the file is larger than {MAX_TENANTS_FILE_BYTES} bytes"
        )
    try:
        return parse_tenants_file(data)
    except Invalid as error:
        raise Invalid(f"tenants file {path}: {error}") from error


def parse_tenants_file(data: bytes) -> TenantDirectory:
    """Parse the contents of a tenants file. Raises Invalid if they are not valid."""
    try:
        values = yaml.load(data, _UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise Invalid(f"the file is not valid YAML: {_truncated_message(error)}") from error
    if not isinstance(values, dict) or "tenants" not in values:
        raise Invalid("the file must be a mapping with `tenants`, which maps names to settings")
    try:
        return _build_directory(_TenantsFileSchema.model_validate(_with_defaults(values)))
    except ValidationError as error:
        raise Invalid(_explain(error)) from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that raises Invalid if a name occurs twice in a mapping. PyYAML's own loader
    silently keeps the last occurrence, so that a second ``keys`` of a tenant would drop the API
    keys in the first one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                line = key.start_mark.line + 1
                raise Invalid(
                    f"the name {key.value!r} occurs twice in one mapping, the second time at line "
                    f"{line}"
                )
            names.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Apply the defaults field by field, so that a tenant with only one limit of its own keeps the
    other default limits."""
    defaults, tenants = values.get("defaults"), values["tenants"]
    if not isinstance(defaults, dict) or not isinstance(tenants, dict):
        return values
    return {
        **values,
        "tenants": {name: _merge_defaults(defaults, own) for name, own in tenants.items()},
    }


def _merge_defaults(defaults: dict[str, Any], own: Any) -> Any:
    if not isinstance(own, dict):
        return own
    filled = {**defaults, **own}
    for part in ("limits", "prices"):
        if isinstance(defaults.get(part), dict) and isinstance(own.get(part), dict):
            filled[part] = {**defaults[part], **own[part]}
    return filled


def _build_directory(file: _TenantsFileSchema) -> TenantDirectory:
    tenants = {TenantId(name): _tenant(name, entry) for name, entry in file.tenants.items()}
    pairs = [(key, TenantId(name)) for name, entry in file.tenants.items() for key in entry.keys]
    return build_tenant_directory(tenants, pairs, needs_keys=True)


def _tenant(name: str, entry: _TenantSchema) -> Tenant:
    return Tenant(
        TenantId(name),
        entry.salt,
        entry.priority,
        entry.weight,
        TenantLimits(**entry.limits.model_dump()),
        TokenPrices(**entry.prices.model_dump()),
        entry.strict_fields,
        None if entry.models is None else frozenset(entry.models),
        entry.exact_kv,
    )


def _explain(error: ValidationError) -> str:
    """Describe the first invalid field: where it is, and what would be valid. The values of keys
    and salts are not shown."""
    first = error.errors(include_url=False)[0]
    path = [str(step) for step in first["loc"] if step != "[key]"]
    where = f"tenant {path[1]!r}: " if path[0] == "tenants" and len(path) > 1 else ""
    named = first["loc"][-1] != "[key]"
    name = ".".join(path[2:] if where else path) if named else "the name"
    if first["type"] == "extra_forbidden":
        return f"{where}unknown field {name!r}"
    is_secret = "keys" in path or "salt" in path
    shown = "wrong" if is_secret else repr(first["input"])[:80]
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}{name or 'the entry'} is {shown}: {message[0].lower()}{message[1:]}"


def _truncated_message(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
