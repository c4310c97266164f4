"""The ``baton`` command line: ``baton up``, ``baton status``, ``baton simulate`` and so on."""
