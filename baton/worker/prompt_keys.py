"""Computes the block keys of a job's prompt."""

from baton.concurrency.threads import run_in_thread
from baton.engine.key_chain import BlockKeyChain, BlockKeyChainFactory
from baton.worker.job import Job
from baton.worker.limits import MAX_INLINE_HASH_TOKENS


async def hash_prompt(job: Job, hasher: BlockKeyChainFactory) -> BlockKeyChain:
    """Compute the block keys of the job's prompt, so that the engine need not compute them between
    two steps, and set ``job.keys`` to them."""
    spec = job.spec
    if len(spec.token_ids) > MAX_INLINE_HASH_TOKENS:
        chain = await run_in_thread(lambda: hasher.make_chain(spec))
    else:
        chain = hasher.make_chain(spec)
    job.keys = tuple(chain.keys)
    return chain
