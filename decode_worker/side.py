"""Builds the decode side of a worker's process, with its connections to the workers from which it
reads KV."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.config import Settings
from baton.rpc.worker_client import GrpcKvImportConnector
from baton.worker.context import WorkerContext
from decode_worker.handler import DecodeHandler
from decode_worker.kv_import import KvImporter, KvImportTimeouts


@asynccontextmanager
async def open_decode_side(
    context: WorkerContext, settings: Settings
) -> AsyncIterator[DecodeHandler]:
    connector = GrpcKvImportConnector(settings.trust)
    try:
        yield DecodeHandler(context, KvImporter(context, connector, KvImportTimeouts()))
    finally:
        await connector.close()
