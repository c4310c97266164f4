"""RBAC rules for users with few permissions."""

PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
WORKLOADS = {"apiGroups": ["apps"], "resources": ["deployments", "statefulsets"], "verbs": ["list"]}
READ_SCALE = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get"]}
PATCH_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
