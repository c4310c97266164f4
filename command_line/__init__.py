"""The command line: ``baton up``, ``baton status``, ``baton simulate`` and the others."""
