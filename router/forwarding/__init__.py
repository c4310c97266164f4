"""Requests that a worker's server answers whole, through its own API: embeddings, scores, audio,
and chats with images. :func:`~router.forwarding.forward.forward` is the way of one request."""
