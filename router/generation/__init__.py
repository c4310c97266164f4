"""The generation of one answer: placement, attempts on workers, failovers, and the stream of
outputs.

- :class:`~router.generation.generation.Generation` repeats placements and attempts until an answer
  is complete.
- :class:`~router.generation.placement_search.PlacementSearch` finds workers for the next attempt.
  It queries a conductor (:class:`~router.generation.conductor_placer.ConductorPlacer`) or, while no
  conductor answers, the hash ring (:class:`~router.generation.ring_placer.RingPlacer`).
- :class:`~router.generation.attempt.Attempt` submits the request to the workers of one placement
  and yields its outputs.
- :class:`~router.generation.worker_connection_pool.WorkerConnectionPool` keeps one connection to
  each worker.
- :class:`~router.generation.cluster.Cluster` is the router's view of the members.
- :class:`~router.generation.quarantine.Quarantine` isolates requests that kill workers.
"""
