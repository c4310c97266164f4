"""The engine: scheduler, paged KV cache, models, sampling (docs/engine.md).

- :class:`~baton.engine.engine.Engine` runs steps: :class:`~baton.engine.inflight.InflightSteps`
  schedules a step, submits it to an executor, perhaps submits the next one, and waits for the
  first; :class:`~baton.engine.step_applier.StepApplier` then applies its output.
- :class:`~baton.engine.scheduler.Scheduler` decides what a step computes, and returns it as a
  :class:`~baton.engine.plan.Plan`.
- :class:`~baton.engine.block_pool.BlockPool` allocates KV blocks and is the prefix cache.
- :class:`~baton.engine.runner.ModelRunner` loads a model and computes plans.
- :class:`~baton.engine.model.Model` is the decoder in torch. The folder ``native`` has a
  decoder in C++ for CPUs, and the folder ``cuda`` has kernels for GPUs.
- :mod:`~baton.engine.sampler` chooses tokens.
"""
