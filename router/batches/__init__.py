"""Batches of requests from files, run while the cluster has idle capacity.

- :class:`~router.batches.service.BatchService` serves the files and batches of all tenants.
- :class:`~router.batches.file_store.FileStore` stores files on disk.
- :class:`~router.batches.batch_store.BatchStore` stores batches on disk.
- :class:`~router.batches.batch_runner.BatchRunner` runs all batches, and
  :class:`~router.batches.batch_job.BatchJob` runs one of them.
"""
