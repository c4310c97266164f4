"""The code that prefill and decode workers share: admitting requests, delivering outputs, draining.

- :class:`~baton.worker.program.WorkerProgram`: a worker process. It opens the worker's prefill side
  and its decode side, and their connections to other processes.
- :class:`~baton.worker.worker.Worker`: admits requests, delivers outputs, drains. It composes a
  :class:`~baton.worker.sides.PrefillSide` (computes prompts) and a
  :class:`~baton.worker.sides.DecodeSide` (generates answers), which don't know each other.
- :class:`~baton.worker.job.Job`, :class:`~baton.worker.job_table.JobTable` and
  :class:`~baton.worker.job_lifecycle.JobLifecycle`: one placement of a request, all placements on
  the worker, and how they start and end.
- :class:`~baton.worker.engine_thread.EngineThread`: the thread that owns the engine; other code
  sends it commands through :class:`~baton.worker.engine_thread.EngineHandle`.
- :class:`~baton.worker.context.WorkerContext`: the engine, KV pool and identity of a worker.
- :class:`~baton.worker.block_reader.BlockReader` and
  :class:`~baton.worker.block_encoder.BlockEncoder`: read blocks of other processes into the KV
  pool, and encode blocks for them; both use the :class:`~baton.worker.staging_area.StagingArea`.
- :class:`~baton.worker.codec_meter.CodecMeter`: measures the codecs while they are used.
- :class:`~baton.worker.role_state.RoleState`, :class:`~baton.worker.load_monitor.LoadMonitor`: the
  role and load that the worker announces.
- :mod:`baton.worker.mock`: mock workers without a model.
"""
