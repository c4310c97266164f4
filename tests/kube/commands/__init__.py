"""Tests of ``baton status``, ``scale`` and ``drain`` with ``--on kubernetes``."""
