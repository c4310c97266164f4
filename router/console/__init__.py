"""The console: a web page at ``/ui`` that shows the cluster live, and the data that it reads.

- ``state``: what the page shows, as plain JSON values, computed from what the router knows.
- ``feed``: turns states into frames, once a second for all pages together.
- ``cluster_reader``: what the router has to ask others for: pool sizes, plans, KV stores.
- ``routes``: the page's files, ``/admin/state`` and ``/admin/events``.
- ``assets``: the page itself. It has no build step; its libraries are in ``assets/vendor``.
"""
