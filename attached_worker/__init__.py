"""A worker whose engine is an inference server: one that runs already, or one that it starts.

To routers and conductors it is a worker like any other: token ids in, tokens out. It keeps no KV
and imports no torch; :class:`attached_worker.server.ModelServer` is what it needs of a server, and
:class:`attached_worker.vllm_server.VllmServer` speaks to ``vllm serve``.
"""
