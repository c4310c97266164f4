"""Tenants: authentication, quotas, admission, usage.

- :class:`~router.tenants.authentication.Authenticator` finds the tenant of an API key.
- :class:`~router.tenants.admission.AdmissionController` admits a request within its tenant's
  limits.
- :class:`~router.tenants.quota.Quota` counts one tenant's use of its limits.
- :class:`~router.tenants.quota_client.QuotaClient` shares the limits among all routers, by a
  :class:`~router.tenants.quota_store.QuotaStore`.
- :class:`~router.tenants.fair_limiter.FairLimiter` limits concurrent requests fairly, and
  :class:`~router.tenants.fair_thread_pool.FairThreadPool` lets tenants take turns where calls wait.
- :class:`~router.tenants.usage_recorder.UsageRecorder` counts the tokens that tenants used.
"""
