"""The decode side of a worker: importing the KV of prompts, and generating their answers.

- :class:`~decode_worker.handler.DecodeHandler`: starts to decode once the KV is imported,
  quarantines the blocks of transfers that have not ended, and takes an answer out of the batch if
  another worker is to continue it.
- :class:`~decode_worker.kv_import.KvImporter`: opens a KV transfer and reserves blocks.
- :class:`~decode_worker.chunk_reader.ChunkReader`: reads and verifies blocks, two chunks
  at a time.
- :class:`~decode_worker.reservation_queue.ReservationQueue`: decides which request gets free blocks
  next.
- :func:`~decode_worker.side.open_decode_side` connects all of these in a worker's process.
"""
