"""The jobs on a worker, by placement and by request."""

from collections.abc import Iterator

from baton.core.ids import RequestId
from baton.worker.job import Job


class JobTable:
    """The jobs by their placements' ids. A request may have several jobs while its older placements
    are being ended; :meth:`latest` returns the newest one."""

    def __init__(self) -> None:
        self._jobs: dict[RequestId, Job] = {}  # by placement id
        self._latest: dict[RequestId, Job] = {}  # by request id

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """Iterate over a copy, oldest first, so that jobs may be added and removed meanwhile."""
        return iter(list(self._jobs.values()))

    def __contains__(self, job: Job) -> bool:
        return job.spec.request_id in self._jobs

    def get(self, placement: RequestId) -> Job | None:
        return self._jobs.get(placement)

    def latest(self, request_id: RequestId) -> Job | None:
        """Return the job of the request's latest placement; None if the request is not on this
        worker."""
        return self._latest.get(request_id)

    def add(self, job: Job) -> None:
        self._jobs[job.spec.request_id] = self._latest[job.request_id] = job

    def remove(self, job: Job) -> None:
        del self._jobs[job.spec.request_id]
        if self._latest.get(job.request_id) is job:
            del self._latest[job.request_id]
