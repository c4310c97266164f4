"""The conductor, which places requests on workers and plans the sizes of the pools.

- :class:`~conductor.conductor.Conductor` answers placement requests: it takes a snapshot, asks a
  policy, and records the decision.
- :class:`~conductor.worker_directory.WorkerDirectory` knows the ready workers in the registry.
- :class:`~conductor.cache_index.CacheIndex` estimates which worker and which store node has which
  blocks.
- :class:`~conductor.load_tracker.LoadTracker` tracks the load of both pools, also between the
  workers' reports.
- :class:`~conductor.planner.Planner` plans pool sizes.
- :class:`~conductor.program.ConductorProgram` is one conductor process.
- The package ``policy`` makes the decisions, in pure functions.
"""
