"""Builds the prefill side of a worker's process, with its connections to the KV store."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.config import Settings
from baton.core.member import Member
from baton.core.store import RAW_ONLY
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.kv.redis_index import RedisKvIndex
from baton.registry.membership import Membership
from baton.rpc.kvstore_client import KvStoreClient
from baton.worker.block_encoder import BlockEncoder
from baton.worker.block_reader import BlockReader
from baton.worker.context import WorkerContext
from prefill_worker.cluster_prefix_store import ClusterPrefixStore
from prefill_worker.handler import PrefillHandler
from prefill_worker.reload_policy import ReloadMode
from prefill_worker.store_encoder import StoreEncoder
from prefill_worker.store_publisher import StorePublisher

MODEL_TAG_BYTES = 16
"""Number of leading bytes of the model's digest that tag the model's blocks in the store."""


@asynccontextmanager
async def open_prefill_side(
    context: WorkerContext, settings: Settings, membership: Membership
) -> AsyncIterator[PrefillHandler]:
    """Open the prefill side, which uses the store nodes in ``membership``."""

    def connect(node: Member) -> KvStoreClient:
        socket_path = node.local_socket if node.host == context.host else ""
        return KvStoreClient(
            node.address, settings.trust, socket_path, settings.store_timeout_seconds
        )

    reader = BlockReader(
        context.layout,
        context.staging,
        context.codecs,
        context.clock,
        settings.store_timeout_seconds,
    )
    index = RedisKvIndex(settings.required_redis_url, settings.cluster)
    client = ClusterStoreClient(
        membership,
        index,
        context.transports,
        connect,
        context.host,
        context.clock,
        settings.store_timeout_seconds,
        RAW_ONLY.union(reader.accepted(exact=False)),
    )
    try:
        yield PrefillHandler(context, _build_store(context, settings, client, reader))
    finally:
        await client.close()
        await index.close()


def _build_store(
    context: WorkerContext, settings: Settings, client: ClusterStoreClient, reader: BlockReader
) -> ClusterPrefixStore:
    publisher = StorePublisher(
        context.engine,
        client,
        context.layout,
        context.model_digest[:MODEL_TAG_BYTES],
        StoreEncoder(
            BlockEncoder(context.layout, context.staging, context.codecs),
            settings.kv_codec_store,
            num_exact_blocks=context.engine_config.num_groups,
        ),
        always_exact=not settings.has_lossy_kv_codec,
    )
    return ClusterPrefixStore(
        context.engine,
        client,
        publisher,
        context.layout,
        context.engine_config,
        context.clock,
        settings.store_timeout_seconds,
        None if settings.store_reload == "auto" else ReloadMode(settings.store_reload),
        reader,
    )
