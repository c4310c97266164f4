"""Settings of a router: keys, limits of its HTTP server, files and batches, stored responses,
timeouts."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from baton.config.values import AsSize, Count, Hosts, Origins, Pairs, Seconds, Size


class RouterSettings(BaseModel):
    """Settings that routers read."""

    # The router
    api_keys: Pairs = Field(default_factory=dict)
    tenants_file: str | None = None
    """YAML file of further tenants besides those of ``api_keys``, with their keys and quotas. It is
    read again when it changes."""
    admin_key: str | None = None
    control_socket: str | None = None
    """Unix socket of the supervisor, for ``/admin/scale``; set by ``baton up``."""
    tenant_secret: str = "baton"
    allow_open_http: bool = False
    max_body_bytes: Size = 8 * 2**20
    max_inflight_body_bytes: Size = 128 * 2**20
    """Limit for the total size of the request bodies that one router has received but not tokenized
    yet."""
    max_concurrent_requests: Count = 1024
    max_connections: Count = 16_384
    """Maximum number of HTTP connections to one router; further ones get a 503. The value is
    lowered to what the limit on open files allows."""
    max_header_bytes: Annotated[int, AsSize, Field(ge=1024)] = 32 * 2**10
    """Limit for the total size of a request's request line and headers."""
    max_headers: Annotated[int, Field(ge=8)] = 100
    header_timeout_seconds: Seconds = 10.0
    """Timeout from the first byte of a connection, or of a further request on it, to the end of
    the headers."""
    body_timeout_seconds: Seconds = 60.0
    keep_alive_timeout_seconds: Seconds = 75.0
    """How long a connection may be idle between two requests. The default is longer than that of
    common load balancers, so that they, not the router, close the connection."""
    write_timeout_seconds: Seconds = 30.0
    """How long a client may take to read what has been written (64 KiB) before its connection is
    closed."""
    endpoint_grace_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long a stopping router keeps accepting requests while it reports that it is not ready, so
    that every load balancer in front of it notices. ``drain_timeout_seconds`` begins after this."""
    request_timeout_seconds: Seconds = 3600.0
    """Timeout of a request, from the end of its body to the end of its answer."""
    cors_origins: Origins = ()
    """Origins whose web pages may send requests from a browser: exact origins, or ``*``. This never
    includes the admin API."""
    allowed_hosts: Hosts = ()
    """Host names that a router on loopback without keys accepts besides those of loopback, e.g.
    behind a proxy on the same machine. ``*``: any. A router that listens beyond loopback accepts
    any host name if this is empty."""
    special_tokens_in_messages: Literal["parsed", "refused"] = "parsed"
    """Special tokens in messages of users and tools. ``parsed``: they become the model's control
    tokens, as in other servers; ``refused``: a request that contains one is refused."""
    strict_fields: bool = False
    """Refuse requests with unknown fields. Otherwise a field that would change the answer is
    refused, and any other is ignored; the response's header ``x-baton-ignored-fields`` names it.
    The tenants file may override this setting for each tenant."""
    access_log: bool = False
    """Write a line of JSON per request to stderr, without prompts and answers."""
    tool_parser: Literal[
        "auto", "none", "harmony", "kimi_k3", "kimi_k2", "deepseek_v41", "deepseek_v4",
        "deepseek_v32", "deepseek_v3", "deepseek_v31", "minimax_m2", "seed_oss", "gemma4",
        "command", "phi4_mini", "lfm2", "nemotron", "hunyuan", "glm45", "glm47",
        "qwen3_xml", "hermes", "mistral", "mistral_v3", "pythonic", "llama3"
    ] = "auto"  # fmt: skip
    """Format in which the model writes tool calls. ``auto``: determined by its chat template."""
    reasoning_parser: Literal[
        "auto", "none", "harmony", "kimi_k3", "mistral", "seed_oss", "command", "gemma4",
        "hunyuan", "think", "qwen3", "deepseek_r1"
    ] = "auto"  # fmt: skip
    """Format of the model's reasoning. ``auto``: determined by its chat template.
    ``deepseek_r1`` is for models whose answer begins with reasoning although the prompt does not
    open it."""
    generation_defaults: Literal["model", "none"] = "model"
    """The sampling parameters of requests that leave them out. ``model``: those in the model's
    generation_config.json; ``none``: temperature 1 and no other restriction."""
    batch_folder: str | None = None
    """Folder of uploaded files and batches. None: one per cluster below BATON_HOME."""
    batch_concurrency: Annotated[int, Field(ge=0)] = 2
    """Maximum number of concurrent batch requests per decode worker while no other requests wait.
    0: batches are not run."""
    max_file_bytes: Size = 64 * 2**20
    batch_folder_bytes: Size = 4 * 2**30
    """Limit for the total size of all tenants' files."""
    tenant_files: Count = 10_000
    """Maximum number of files of one tenant. The tenants file may override this setting and the
    next three for each tenant. Listing this many files takes a second."""
    tenant_file_bytes: Size = 2**30
    tenant_uploads_per_minute: Count = 60
    tenant_concurrent_uploads: Count = 4
    response_ttl_seconds: Annotated[float, Field(ge=0, le=366 * 86_400)] = 86_400.0
    """How long responses of ``/v1/responses`` are stored in Redis, with their prompts. Background
    responses must be stored at least as long as they take. 0: no response is stored."""
    tenant_response_bytes: Size = 64 * 2**20
    """Limit for the total size of one tenant's stored responses. Beyond it, the oldest are
    removed."""
    tenant_responses: Count = 100_000
    """Maximum number of stored responses of one tenant. Beyond it, the oldest are removed."""
    response_bytes: Size = 128 * 2**20
    """Limit for the total size of all tenants' stored responses. Beyond it, the oldest responses of
    the tenant with most bytes are removed. Redis needs twice as much memory."""
    placement_timeout_seconds: Seconds = 5.0
    """Timeout for a conductor to place a request."""
    first_token_timeout_seconds: Seconds = 120.0
    """If a worker makes no progress with any request for this long, the requests that wait for its
    first token, or for the KV transfer to it, fail over. A request in the queue of a worker that
    makes progress waits, for at most ``request_timeout_seconds``."""
    next_token_timeout_seconds: Seconds = 60.0
    """The same for requests that wait for a further token."""
