"""LoRA adapters (Hu et al. 2021): low-rank additions to the base model's projections, different for
each request of a batch.

- :mod:`~baton.engine.lora.adapter`: an adapter's matrices, joined as the base model's are.
- :mod:`~baton.engine.lora.segments`: which tokens of a step use which adapter, and the additions,
  computed with torch.
- :mod:`~baton.engine.lora.table`: the adapters that are loaded into an engine.

The CPU kernels compute the additions themselves: ``native/lora.py`` and ``native/kernels/lora.h``.
"""
