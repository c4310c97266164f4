"""``baton kv``: inspect and manage the KV store."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import track
from rich.table import Table

from baton.checkpoints.hub import short_name
from baton.clock import SystemClock
from baton.config import baton_home
from baton.core.block_key import BLOCK_KEY_BYTES, KeyRoot, block_keys
from baton.core.ids import BlockKey, TenantId, TokenId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.store import BlockFilter, LeaseRequest, StoredBlock, StoreStats
from baton.core.tenant import tenant_salt, tenant_tag
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import Invalid, NotFound, Unavailable
from baton.network.pinned_tls import pinned_tls_context
from baton.registry.redis import RedisRegistry
from baton.reports.console import open_console
from baton.rpc.kvstore_client import KvStoreClient
from orchestrator.cluster_state import ClusterFolder, ClusterState

T = TypeVar("T")

ROUTER_TIMEOUT_SECONDS = 300.0
_AGES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_age(text: str) -> float:
    """Return an age like ``90``, ``15m``, ``2h`` or ``3d`` in seconds. Raises Invalid for any other
    text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None:
        raise Invalid(f"the age is {text!r}; it must be like 90, 15m, 2h or 3d")
    return float(match[1]) * _AGES[match[2] or "s"]


def run_stats(name: str, as_json: bool) -> None:
    state = ClusterFolder(baton_home(), name).read_running()
    stats = asyncio.run(_call_each_node(state, lambda client: client.stat()))
    if as_json:
        print(json.dumps({node: asdict(node_stats) for node, node_stats in stats.items()}))
        return
    table = Table("", *stats, box=None)
    for label, show in _ROWS:
        table.add_row(label, *[show(node_stats) for node_stats in stats.values()])
    open_console().print(table)


def run_list(name: str, filter_: BlockFilter, limit: int, as_json: bool) -> None:
    state = ClusterFolder(baton_home(), name).read_running()
    pages = asyncio.run(
        _call_each_node(state, lambda client: client.list_blocks(filter_, 0, limit))
    )
    if as_json:
        listing = {
            node: {"total": total, "blocks": [_block_object(block) for block in blocks]}
            for node, (blocks, total) in pages.items()
        }
        print(json.dumps(listing))
        return
    now = SystemClock().wall_nanoseconds() / 1e9
    table = Table(
        "node",
        "key",
        "tier",
        "bytes",
        "codec",
        "raw bytes",
        "depth",
        "tenant",
        "model",
        "age",
        box=None,
    )
    for node, (blocks, _) in pages.items():
        for block in blocks:
            table.add_row(node, *_block_row(block, now))
    open_console().print(table)
    for node, (blocks, total) in pages.items():
        print(f"{node}: {len(blocks)} of {total} blocks, oldest first")


def run_find(name: str, wanted: str, tenant: str, exact_kv: bool, as_json: bool) -> None:
    """Print how many of the wanted blocks each store node has. ``wanted`` is a block key in hex, or
    the text of a prompt. ``exact_kv``: look for the KV of requests with ``exact_kv``."""
    state = ClusterFolder(baton_home(), name).read_running()
    keys = asyncio.run(_keys_of(state, wanted, tenant, exact_kv))
    query = LeaseRequest(tuple(keys), 1.0, 0)
    found = asyncio.run(_call_each_node(state, lambda client: client.lease(query)))
    held = {node: leased.num_stored for node, leased in found.items()}
    if as_json:
        print(json.dumps({"num_blocks": len(keys), "held": held}))
        return
    for node, count in held.items():
        print(f"{node}: {count} of {len(keys)} blocks")


def run_purge(name: str, filter_: BlockFilter, as_json: bool) -> None:
    state = ClusterFolder(baton_home(), name).read_running()
    purged = asyncio.run(_call_each_node(state, lambda client: client.purge(filter_)))
    if as_json:
        print(json.dumps({"purged": purged}))
        return
    for node, count in purged.items():
        print(f"{node}: {count} blocks purged")


def run_warm(
    name: str,
    prompts: Sequence[str],
    api_key: str | None,
    chat: bool,
    fields: Mapping[str, Any],
) -> None:
    """Request one token for each prompt, so that the prompt's KV is stored. ``fields`` are further
    fields of the requests. Raises Unavailable when a request fails."""
    import httpx

    state = ClusterFolder(baton_home(), name).read_running()
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    num_tokens = num_cached = 0
    with httpx.Client(
        base_url=state.url,
        headers=headers,
        timeout=ROUTER_TIMEOUT_SECONDS,
        trust_env=False,
        verify=pinned_tls_context(state.tls_certificate) or True,
    ) as client:
        for prompt in track(prompts, "warming", console=open_console()):
            usage = _warm_one(client, prompt, chat, fields)
            num_tokens += usage["prompt_tokens"]
            num_cached += usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{len(prompts)} prompts, {num_tokens} tokens: {num_cached} were cached already")


def block_filter(
    name: str, tenant: str | None, model: str | None, older_than: str | None
) -> BlockFilter:
    """Return the filter for a tenant's name, a model (its directory, hub id or digest), and an
    age."""
    state = ClusterFolder(baton_home(), name).read_running()
    tag = tenant_tag(_salt(state, tenant)) if tenant else b""
    before = None
    if older_than is not None:
        before = SystemClock().wall_nanoseconds() / 1e9 - parse_age(older_than)
    digest = asyncio.run(_model_tag(state, model)) if model else b""
    return BlockFilter(tag, digest, before)


def read_prompts(texts: Sequence[str], path: Path | None) -> list[str]:
    """Return ``texts`` and the prompts in the file. The file has one prompt per line, as a JSON
    string or plain text. Raises Invalid if there is no prompt, or the file can't be read."""
    prompts = list(texts)
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise Invalid(f"--prompt-file {path}: {error}") from error
        prompts += [_parse_prompt(line) for line in lines if line.strip()]
    if not prompts:
        raise Invalid("warm needs --prompt TEXT or --prompt-file FILE")
    return prompts


def _parse_prompt(line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        return line
    return value if isinstance(value, str) else line


def _warm_one(client: Any, prompt: str, chat: bool, fields: Mapping[str, Any]) -> Any:
    import httpx

    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    try:
        response = client.post(path, json={**body, **fields, "max_tokens": 1, "temperature": 0})
    except httpx.HTTPError as error:
        raise Unavailable(f"the router does not answer: {error}") from error
    if response.status_code != 200:
        raise Unavailable(f"the router returned {response.status_code}: {response.text}")
    return response.json()["usage"]


async def _call_each_node(
    state: ClusterState, call: Callable[[KvStoreClient], Awaitable[T]]
) -> dict[str, T]:
    """Call each store node that is ready, and return the responses by the node's id. Raises
    NotFound when no store node is ready."""
    responses: dict[str, T] = {}
    for member in await _ready_members(state, (Role.KVSTORE,)):
        client = KvStoreClient(member.address, state.credentials)
        try:
            responses[member.id] = await call(client)
        finally:
            await client.close()
    if not responses:
        raise NotFound("no store node is ready")
    return responses


async def _ready_members(state: ClusterState, roles: Collection[Role]) -> list[Member]:
    registry = RedisRegistry(state.redis_url, state.cluster, state.cluster_secret)
    try:
        members = await registry.members()
    finally:
        await registry.close()
    ready = [m for m in members if m.role in roles and m.state is WorkerState.READY]
    return sorted(ready, key=lambda member: member.id)


async def _any_ready_worker(state: ClusterState) -> Member:
    workers = await _ready_members(state, WORKER_KINDS)
    if not workers:
        raise Unavailable(
            "no worker is ready; without one, a prompt's block keys can't be computed, since they "
            "depend on the worker's model"
        )
    return workers[0]


async def _model_tag(state: ClusterState, model: str) -> bytes:
    if re.fullmatch(r"[0-9a-f]{32}([0-9a-f]{2})*", model):
        return bytes.fromhex(model)[:16]
    for member in await _ready_members(state, WORKER_KINDS):
        if member.model in (model, short_name(model)):
            return bytes.fromhex(member.model_digest)[:16]
    raise NotFound(
        f"no worker serves {model!r}; a model that is not served must be named by its digest in hex"
    )


async def _keys_of(state: ClusterState, wanted: str, tenant: str, exact_kv: bool) -> list[BlockKey]:
    if re.fullmatch(f"[0-9a-f]{{{2 * BLOCK_KEY_BYTES}}}", wanted):
        return [BlockKey(bytes.fromhex(wanted))]
    worker = await _any_ready_worker(state)
    root = KeyRoot(
        bytes.fromhex(worker.model_digest),
        worker.kv_dtype,
        worker.block_tokens,
        tenant_salt=_salt(state, tenant),
        lossy_codec="" if exact_kv else worker.kv_codecs.lossy,
    )
    tokens = _tokenize(state, wanted)
    keys = block_keys(root.key(), tokens, worker.block_tokens)
    if not keys:
        raise Invalid(
            f"the prompt has {len(tokens)} tokens; it must have at least {worker.block_tokens}, "
            "the size of a block"
        )
    return keys


def _tokenize(state: ClusterState, prompt: str) -> list[TokenId]:
    import httpx

    try:
        response = httpx.post(
            f"{state.url}/tokenize",
            json={"prompt": prompt},
            timeout=30,
            trust_env=False,
            verify=pinned_tls_context(state.tls_certificate) or True,
        )
    except httpx.HTTPError as error:
        raise Unavailable(f"the router does not answer: {error}") from error
    if response.status_code != 200:
        raise Unavailable(f"the router returned {response.status_code}: {response.text}")
    return [TokenId(token) for token in response.json()["tokens"]]


def _salt(state: ClusterState, tenant: str) -> bytes:
    return tenant_salt(state.tenant_secret, TenantId(tenant))


def _block_object(block: StoredBlock) -> dict[str, Any]:
    return {
        **asdict(block),
        "key": block.key.hex(),
        "tier": block.tier.name.lower(),
        "tenant": block.tenant.hex(),
        "model": block.model.hex(),
    }


def _block_row(block: StoredBlock, now: float) -> list[str]:
    return [
        block.key.hex(),
        block.tier.name.lower(),
        f"{block.size_bytes:,}",
        block.codec.value,
        f"{block.raw_bytes:,}",
        str(block.depth),
        block.tenant.hex()[:8],
        block.model.hex()[:8],
        f"{now - block.stored_at:.0f} s",
    ]


def _format_usage(used: int, capacity: int) -> str:
    return f"{used / 2**20:,.1f} of {capacity / 2**20:,.0f} MiB" if capacity else "none"


def _format_ratio(raw: int, used: int) -> str:
    """``raw`` are the bytes that the blocks in ``used`` bytes of slots would have if none were
    encoded."""
    return f"{raw / 2**20:,.1f} MiB of KV ({raw / used:.2f} per byte)" if used else "empty"


_ROWS: tuple[tuple[str, Callable[[StoreStats], str]], ...] = (
    ("DRAM", lambda s: _format_usage(s.used_bytes, s.arena_bytes)),
    ("DRAM blocks", lambda s: f"{s.num_blocks:,}"),
    ("DRAM codecs", lambda s: _format_ratio(s.raw_bytes, s.used_bytes)),
    ("leased blocks", lambda s: f"{s.leased_blocks:,}"),
    ("pinned", lambda s: f"{s.pinned_bytes / 2**20:,.1f} MiB"),
    ("SSD", lambda s: _format_usage(s.disk_used_bytes, s.disk_capacity_bytes)),
    ("SSD blocks", lambda s: f"{s.disk_blocks:,}"),
    ("SSD codecs", lambda s: _format_ratio(s.disk_raw_bytes, s.disk_used_bytes)),
    ("hits in DRAM", lambda s: f"{s.hit_blocks_dram:,} blocks"),
    ("hits on SSD", lambda s: f"{s.hit_blocks_disk:,} blocks"),
    ("misses", lambda s: f"{s.missed_blocks:,} blocks"),
    ("put", lambda s: f"{s.put_blocks:,} blocks, {s.put_bytes / 2**20:,.1f} MiB"),
    ("evicted", lambda s: f"{s.evictions:,}, by quota {s.quota_evictions:,}"),
    (
        "demoted",
        lambda s: (
            f"{s.demotions:,} ({s.encoded_demotions:,} encoded), dropped {s.dropped_blocks:,}"
        ),
    ),
    ("promoted", lambda s: f"{s.promotions:,}"),
    ("evicted from SSD", lambda s: f"{s.disk_evictions:,}"),
    ("purged", lambda s: f"{s.purged_blocks:,}"),
    ("checksum failures", lambda s: f"{s.checksum_failures:,}"),
    ("disk failures", lambda s: f"{s.disk_failures:,}"),
    ("integrity", lambda s: s.violation or "sound"),
)
