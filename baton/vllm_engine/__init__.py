"""vLLM as the engine of a worker: vLLM loads and computes the model; Baton does everything else.

:class:`baton.vllm_engine.runner.VllmRunner` implements the same contract as Baton's own
:class:`baton.engine.runner.ModelRunner`: it runs plans (:mod:`baton.engine.plan`). It embeds vLLM's
executor, which runs vLLM's workers: in this process or, with tensor parallelism, in one process per
rank. Scheduling, the prefix cache, block allocation, sampling and KV transfer are Baton's,
as with its own engine, so vLLM's scheduler and block manager are not used.

Only :mod:`baton.vllm_engine.versions` and :mod:`baton.vllm_engine.kv_pool` can be imported where
vLLM is not installed.
"""
