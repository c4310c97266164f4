"""Pure functions from a snapshot to a decision: no I/O, no clock, no randomness.

- :class:`~conductor.policy.snapshot.Snapshot` is what a policy may know.
- :class:`~conductor.policy.decision.Decision` is what a policy decides, with its reason and the
  alternatives.
- :func:`~conductor.policy.baton.place` is Baton's own policy; ``baselines`` contains the
  policies of other systems.
- :func:`~conductor.policy.policies.get_policy` finds a policy by its name.
"""
