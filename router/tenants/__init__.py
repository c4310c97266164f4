"""Tenants: authentication, quotas, admission and usage.

- :class:`~router.tenants.authentication.Authenticator` finds the tenant of an API key.
- :class:`~router.tenants.admission.AdmissionController` admits a request within its tenant's
  limits.
- :class:`~router.tenants.quota.Quota` counts one tenant's use of its limits.
- :class:`~router.tenants.quota_client.QuotaClient` shares the limits among all routers, through a
  :class:`~router.tenants.quota_store.QuotaStore`.
- :class:`~baton.concurrency.budget.Budget` limits concurrent requests fairly.
- :class:`~router.tenants.usage_recorder.UsageRecorder` counts the tokens that tenants used.
"""
