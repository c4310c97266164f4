"""The generation of one answer: placement, attempts on workers, failovers, the stream of
outputs."""
