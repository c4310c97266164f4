"""Tenants: authentication, quotas, admission, usage.

- :class:`~router.tenants.authentication.Authenticator` finds the tenant of an API key.
- :class:`~router.tenants.admission.AdmissionController` admits a request within its tenant's
  limits.
- :class:`~router.tenants.quota.Quota` counts one tenant's use of its limits.
- :class:`~router.tenants.quota_client.QuotaClient` shares the limits among all routers, by a
  :class:`~router.tenants.quota_store.QuotaStore`.
- :class:`~router.tenants.fair_limiter.FairLimiter` lets tenants take turns where requests wait.
- :class:`~router.tenants.usage_recorder.UsageRecorder` counts the tokens that tenants used.
"""
