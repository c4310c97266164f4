"""Batches of requests from files, run while the cluster has idle capacity.

- :class:`~router.batches.service.BatchService` serves the files and batches of all tenants.
- :class:`~router.batches.file_store.FileStore` stores files, and
  :class:`~router.batches.batch_store.BatchStore` batches, on disk.
- :class:`~router.batches.batch_runner.BatchRunner` runs batches;
  :class:`~router.batches.batch_job.BatchJob` is one of them.
"""
