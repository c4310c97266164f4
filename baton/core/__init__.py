"""Types that all packages share: ids, requests, block keys, members. They need only the standard
library.

- :class:`~baton.core.request.RequestSpec` is one placement of a request,
  :class:`~baton.core.request.RequestOutput` is what a worker sends back.
- :class:`~baton.core.placement.Placement` names the workers of a request.
- :class:`~baton.core.block_key.KeyRoot` starts the hash chain of block keys.
- :class:`~baton.core.member.Member` is one process in the registry.
- :mod:`~baton.core.states` defines the roles and the states of workers.
"""
