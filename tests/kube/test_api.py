"""Tests the API server's storage, validation, patches, field ownership, watches and RBAC."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.clock import ManualClock
from tests.kube.accounts import Accounts, Call, unused_permissions
from tests.kube.api import Api
from tests.kube.failures import Refused
from tests.kube.fields import as_fields_v1, fields_of, from_fields_v1
from tests.kube.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    NAMESPACE,
    POD,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    Kind,
    Object,
)
from tests.kube.patches import apply_json_patch, apply_merge_patch, apply_strategic_merge_patch
from tests.kube.protobuf import MAGIC, decode_object
from tests.kube.request import Request, parse_request
from tests.kube.schemas import schema_of
from tests.kube.selectors import fields_match, labels_match, selects
from tests.kube.subresources import change_scale, scale_of
from tests.kube.tables import table
from tests.kube.watching import watch

APPLY = "application/apply-patch+yaml"
STRATEGIC = "application/strategic-merge-patch+json"


def deployment(name: str = "web", **spec: Any) -> Object:
    container = {"name": "c", "image": "x:1", "env": [{"name": "A", "value": "1"}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"containers": [container]},
            },
            **spec,
        },
    }


@pytest.fixture
def api() -> Api:
    return Api(ManualClock(1_000_000.0))


def patched(
    api: Api, name: str, body: Any, kind: Kind = DEPLOYMENT, content: str = STRATEGIC,
    manager: str = "someone", **query: str,
) -> Object:  # fmt: skip
    request = Request("patch", kind, "default", name, "", query, body, content, manager)
    return api.patch(request)[1]


def applied(api: Api, body: Object, manager: str, force: bool = False) -> Object:
    query = {"fieldManager": manager, "force": str(force).lower()}
    return patched(
        api, body["metadata"]["name"], body, content=APPLY, manager=manager, **query
    )  # fmt: skip


def scaled(api: Api, count: int, version: str | None = None, manager: str = "kubectl") -> Object:
    body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": count}}
    return change_scale(
        api, Request("update", DEPLOYMENT, "default", "web", "scale", {}, body, manager=manager)
    )


# -- objects -----------------------------------------------------------------------------------


def test_a_new_object_gets_a_uid_a_version_and_defaults(api: Api) -> None:
    created = api.create(DEPLOYMENT, deployment())
    assert created["spec"]["replicas"] == 1
    assert created["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": "25%",
        "maxUnavailable": "25%",
    }
    assert created["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 30
    assert created["metadata"]["generation"] == 1
    other = api.create(DEPLOYMENT, deployment("other"))
    assert other["metadata"]["uid"] != created["metadata"]["uid"]
    versions = [int(each["metadata"]["resourceVersion"]) for each in (created, other)]
    assert versions[1] == versions[0] + 1


def test_creating_an_existing_object_is_refused(api: Api) -> None:
    api.create(DEPLOYMENT, deployment())
    with pytest.raises(Refused, match=r'deployments.apps "web" already exists'):
        api.create(DEPLOYMENT, deployment())


def test_an_update_with_an_old_version_or_another_uid_is_refused(api: Api) -> None:
    old = api.create(DEPLOYMENT, deployment())
    api.update(DEPLOYMENT, {**old, "spec": {**old["spec"], "replicas": 2}})
    with pytest.raises(Refused, match="has been modified") as refused:
        api.update(DEPLOYMENT, old)
    assert refused.value.code == 409
    wrong = {"metadata": {"uid": "another"}, "spec": {"replicas": 3}}
    with pytest.raises(Refused, match="UID in precondition"):
        patched(api, "web", wrong)


def test_the_generation_counts_changes_of_the_spec_only(api: Api) -> None:
    api.create(DEPLOYMENT, deployment())
    assert patched(api, "web", {"metadata": {"labels": {"a": "b"}}})["metadata"]["generation"] == 1
    assert patched(api, "web", {"spec": {"replicas": 4}})["metadata"]["generation"] == 2


def test_an_update_without_changes_makes_no_new_version(api: Api) -> None:
    created = api.create(DEPLOYMENT, deployment(replicas=2))
    same = patched(api, "web", {"spec": {"replicas": 2}})
    assert same["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selector": {"matchLabels": {"app": "else"}}}, "does not match template"),
        ({"replicas": -1}, "greater than or equal to 0"),
        ({"replicas": "two"}, 'spec.replicas" is "two", which is not integer'),
        ({"replica": 2}, 'unknown field "spec.replica"'),
    ],
)
def test_validation_errors_name_the_field(api: Api, change: Object, message: str) -> None:
    query = {"fieldValidation": "Strict"}
    request = Request("create", DEPLOYMENT, "default", query=query)
    with pytest.raises(Refused, match=message.replace(".", r"\.")):
        api.create(DEPLOYMENT, deployment(**change), request)


def test_a_secret_is_kept_in_base64(api: Api) -> None:
    metadata = {"name": "s", "namespace": "default"}
    created = api.create(SECRET, {"metadata": metadata, "stringData": {"key": "value"}})
    assert created["data"] == {"key": "dmFsdWU="} and "stringData" not in created


def test_services_get_permanent_cluster_ips(api: Api) -> None:
    def service(name: str, **spec: Any) -> Object:
        metadata, ports = {"name": name, "namespace": "default"}, [{"name": "a", "port": 80}]
        return api.create(SERVICE, {"metadata": metadata, "spec": {"ports": ports, **spec}})

    one, two = service("one"), service("two")
    assert [each["spec"]["clusterIP"] for each in (one, two)] == ["10.96.0.1", "10.96.0.2"]
    assert service("head", clusterIP="None")["spec"]["clusterIP"] == "None"
    changed = patched(api, "one", {"spec": {"ports": [{"name": "b", "port": 81}]}}, SERVICE)
    assert changed["spec"]["clusterIP"] == "10.96.0.1"
    assert [port["port"] for port in changed["spec"]["ports"]] == [80, 81], (
        "the ports are merged by their numbers"
    )


def test_only_pods_on_a_node_get_a_grace_period(api: Api) -> None:
    spec = {"containers": [{"name": "c", "image": "x:1"}], "terminationGracePeriodSeconds": 7}
    for name, node in (("placed", "n1"), ("pending", None)):
        pod = {"metadata": {"name": name, "namespace": "default"}, "spec": {**spec}}
        pod["spec"] |= {"nodeName": node} if node else {}
        api.create(POD, pod)
        api.delete(POD, "default", name)
    assert api.store.find(POD, "default", "pending") is None
    left = api.store.get(POD, "default", "placed")
    assert left["metadata"]["deletionGracePeriodSeconds"] == 7
    assert left["metadata"]["deletionTimestamp"] == api.timestamp(7)
    with pytest.raises(Refused, match="Precondition failed: uid"):
        api.delete(POD, "default", "placed", {"preconditions": {"uid": "another"}})


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("serviceAccountName", "error looking up service account default/who: not found"),
        ("runtimeClassName", 'pod rejected: RuntimeClass "who" not found'),
        ("priorityClassName", "no PriorityClass with name who was found"),
    ],
)
def test_a_pod_that_refers_to_missing_objects_is_refused(
    api: Api, field: str, message: str
) -> None:
    metadata = {"name": "p", "namespace": "default"}
    spec = {"containers": [{"name": "c", "image": "x"}], field: "who"}
    with pytest.raises(Refused, match=message):
        api.create(POD, {"metadata": metadata, "spec": spec})


# -- patches -----------------------------------------------------------------------------------


def test_merge_patch() -> None:
    target = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert apply_merge_patch(target, {"a": {"b": None, "c": [3]}, "e": 2}) == {
        "a": {"c": [3]}, "d": 1, "e": 2,
    }  # fmt: skip


def test_json_patch() -> None:
    operations: list[Object] = [
        {"op": "test", "path": "/a~1b", "value": 1},
        {"op": "add", "path": "/list/-", "value": 3},
        {"op": "replace", "path": "/list/0", "value": 0},
        {"op": "remove", "path": "/a~1b"},
        {"op": "move", "from": "/x", "path": "/y"},
    ]
    target = {"a/b": 1, "list": [1, 2], "x": {"z": 1}}
    assert apply_json_patch(target, operations) == {"list": [0, 2, 3], "y": {"z": 1}}
    with pytest.raises(Refused, match="the value at the path is not the tested value"):
        apply_json_patch(target, [{"op": "test", "path": "/a~1b", "value": 2}])


def test_strategic_merge_merges_lists_by_their_keys() -> None:
    schema = schema_of(DEPLOYMENT)
    change = {
        "spec": {
            "template": {
                "spec": {
                    "$setElementOrder/containers": [{"name": "side"}, {"name": "c"}],
                    "containers": [
                        {"name": "side", "image": "y:1"},
                        {"name": "c", "env": [{"name": "B", "value": "2"}]},
                    ],
                }
            }
        }
    }
    out = apply_strategic_merge_patch(deployment(), change, schema)
    containers = out["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in containers] == ["side", "c"]
    assert containers[1]["image"] == "x:1"
    assert [each["name"] for each in containers[1]["env"]] == ["A", "B"]
    gone = {"spec": {"template": {"spec": {"containers": [{"name": "side", "$patch": "delete"}]}}}}
    left = apply_strategic_merge_patch(out, gone, schema)["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in left] == ["c"]
    recreate = {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}
    rolling = deployment(strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}})
    assert apply_strategic_merge_patch(rolling, recreate, schema)["spec"]["strategy"] == {
        "type": "Recreate"
    }


# -- field ownership ---------------------------------------------------------------------------


def owners(found: Object, field: str) -> list[str]:
    return [
        entry["manager"]
        for entry in found["metadata"]["managedFields"]
        if field in json.dumps(entry["fieldsV1"])
    ]


def test_field_sets_survive_a_round_trip_through_fields_v1() -> None:
    fields = fields_of(deployment(replicas=2), schema_of(DEPLOYMENT))
    assert (("f", "spec"), ("f", "replicas")) in fields
    assert (("f", "spec"), ("f", "selector")) in fields, "a selector is owned as a whole"
    assert from_fields_v1(as_fields_v1(fields)) == fields


def test_applying_a_field_that_another_manager_changed_is_a_conflict(api: Api) -> None:
    applied(api, deployment(replicas=2), "helm")
    scaled(api, 5)
    with pytest.raises(Refused) as refused:
        applied(api, deployment(replicas=2), "helm")
    assert refused.value.code == 409
    assert refused.value.message == (
        'Apply failed with 1 conflict: conflict with "kubectl" with subresource "scale" using '
        "apps/v1: .spec.replicas"
    )


def test_applying_the_current_value_shares_ownership(api: Api) -> None:
    applied(api, deployment(replicas=2), "helm")
    scaled(api, 5)
    now = applied(api, deployment(replicas=5), "helm")
    assert now["spec"]["replicas"] == 5
    assert sorted(owners(now, "f:replicas")) == ["helm", "kubectl"]


def test_a_forced_apply_takes_over_ownership(api: Api) -> None:
    applied(api, deployment(replicas=2), "helm")
    scaled(api, 5)
    now = applied(api, deployment(replicas=2), "helm", force=True)
    assert now["spec"]["replicas"] == 2 and owners(now, "f:replicas") == ["helm"]


def test_a_field_that_its_only_owner_no_longer_applies_gets_its_default(api: Api) -> None:
    applied(api, deployment(replicas=3), "helm")
    assert applied(api, deployment(), "helm")["spec"]["replicas"] == 1


def test_a_field_with_another_owner_is_kept(api: Api) -> None:
    applied(api, deployment(replicas=3), "helm")
    applied(api, deployment(replicas=3), "other")
    assert applied(api, deployment(), "helm")["spec"]["replicas"] == 3


def test_list_items_have_owners_of_their_own(api: Api) -> None:
    applied(api, deployment(), "helm")
    more = deployment()
    more["spec"]["template"]["spec"]["containers"][0] = {
        "name": "c", "env": [{"name": "B", "value": "2"}],
    }  # fmt: skip
    now = applied(api, more, "other")
    (container,) = now["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "x:1"
    assert sorted(each["name"] for each in container["env"]) == ["A", "B"]
    less = deployment()
    less["spec"]["template"]["spec"]["containers"][0].pop("env")
    (container,) = applied(api, less, "helm")["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in container["env"]] == ["B"]


# -- scale -------------------------------------------------------------------------------------


def test_the_scale_subresource_can_be_read_and_written(api: Api) -> None:
    created = api.create(DEPLOYMENT, deployment(replicas=2))
    scale = scale_of(created)
    assert (scale["spec"]["replicas"], scale["status"]["selector"]) == (2, "app=web")
    now = scaled(api, 3, created["metadata"]["resourceVersion"])
    assert now["spec"]["replicas"] == 3
    with pytest.raises(Refused, match="has been modified"):
        scaled(api, 4, created["metadata"]["resourceVersion"])


# -- selectors, paths, watches -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("a=1", True), ("a==1,b=2", True), ("a!=1", False), ("a in (0, 1),b", True),
        ("a notin (1)", False), ("!c", True), ("c", False), ("", True),
    ],
)  # fmt: skip
def test_label_selectors(selector: str, found: bool) -> None:
    assert labels_match(selector, {"a": "1", "b": "2"}) is found


def test_field_selectors_and_selectors_of_objects() -> None:
    assert fields_match("metadata.name=x,status.phase!=Running", {"metadata": {"name": "x"}})
    assert not fields_match("metadata.name=y", {"metadata": {"name": "x"}})
    assert not selects(None, {}) and selects({}, {"a": "b"})
    expression = {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}
    assert selects(expression, {}) and not selects(expression, {"a": "b"})


def test_requests_are_parsed_into_the_verbs_and_resources_of_roles(api: Api) -> None:
    def parse(method: str, path: str, **query: str) -> tuple[str, str, str, str]:
        request = parse_request(method, path, query, api.kinds)
        return request.verb, request.resource, request.namespace, request.single

    base = "/apis/apps/v1/namespaces/a/deployments"
    assert parse("GET", base) == ("list", "deployments", "a", "")
    assert parse("GET", base, watch="true") == ("watch", "deployments", "a", "")
    assert parse("GET", base, fieldSelector="metadata.name=x")[3] == "x"
    assert parse("PATCH", base + "/x/scale") == ("patch", "deployments/scale", "a", "x")
    assert parse("GET", "/api/v1/namespaces/a") == ("get", "namespaces", "", "a")
    assert parse("DELETE", "/api/v1/namespaces/a/pods") == ("deletecollection", "pods", "a", "")
    with pytest.raises(Refused, match="could not find the requested resource"):
        parse("GET", base + "/x/nothing")


def events(api: Api, most: int, **query: str) -> list[tuple[str, str]]:
    request = Request("watch", CONFIG_MAP, "default", query={"timeoutSeconds": "9", **query})
    stream: Iterator[Object] = watch(api, request, lambda: False)
    return [
        (event["type"], event["object"].get("metadata", {}).get("name", ""))
        for _, event in zip(range(most), stream, strict=False)
    ]


def config_map(api: Api, name: str, **labels: str) -> Object:
    metadata = {"name": name, "namespace": "default", "labels": labels}
    return api.create(CONFIG_MAP, {"metadata": metadata})


def test_a_watch_reports_objects_that_enter_and_leave_its_selector(api: Api) -> None:
    first = str(api.store.version)
    config_map(api, "a", app="x")
    config_map(api, "b", app="y")
    patched(api, "a", {"metadata": {"labels": {"app": "z"}}}, CONFIG_MAP)
    patched(api, "b", {"metadata": {"labels": {"app": "x"}}}, CONFIG_MAP)
    found = events(api, 3, resourceVersion=first, labelSelector="app=x")
    assert found == [("ADDED", "a"), ("DELETED", "a"), ("ADDED", "b")]


def test_a_watch_may_begin_with_existing_objects_and_a_bookmark(api: Api) -> None:
    config_map(api, "a", app="x")
    query = {"sendInitialEvents": "true", "allowWatchBookmarks": "true", "labelSelector": "app=x"}
    found = events(api, 2, **query)
    assert found == [("ADDED", "a"), ("BOOKMARK", "")]


def test_a_watch_from_a_forgotten_version_ends_with_an_error(api: Api) -> None:
    for number in range(4200):
        config_map(api, f"a{number}")
    assert events(api, 2, resourceVersion="2") == [("ERROR", "")]


def test_a_namespace_gets_a_default_service_account(api: Api) -> None:
    api.create(NAMESPACE, {"metadata": {"name": "new"}})
    metadata = {"name": "p", "namespace": "new"}
    spec = {"containers": [{"name": "c", "image": "x"}]}
    assert api.create(POD, {"metadata": metadata, "spec": spec})["spec"]["serviceAccount"] == (
        "default"
    )


# -- rights ------------------------------------------------------------------------------------


def test_roles_allow_what_they_name_and_every_call_is_recorded(api: Api) -> None:
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get", "update"],
         "resourceNames": ["web"]},
    ]  # fmt: skip
    metadata = {"name": "r", "namespace": "default"}
    api.create(ROLE, {"metadata": metadata, "rules": rules})
    subjects = [{"kind": "ServiceAccount", "name": "who"}]
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    api.create(ROLE_BINDING, {"metadata": metadata, "roleRef": reference, "subjects": subjects})
    accounts = Accounts(api.store)
    user = accounts.user(f"Bearer {accounts.token('default', 'who')}")

    def may(verb: str, group: str, resource: str, name: str = "") -> bool:
        try:
            accounts.check(Call(user, verb, group, resource, "default", name))
        except Refused as refused:
            assert refused.code == 403 and f"cannot {verb}" in refused.message
            return False
        return True

    assert may("list", "", "pods")
    assert may("update", "apps", "deployments/scale", "web")
    assert not may("update", "apps", "deployments/scale", "other")
    assert not may("update", "apps", "deployments", "web")
    assert not may("delete", "", "pods", "x")
    assert len(accounts.calls) == 5
    assert unused_permissions(rules, accounts.calls) == ["get pods", "get deployments/scale web"]


def test_a_wrong_token_is_refused(api: Api) -> None:
    for wrong in ("", "Bearer x", "Basic admin"):
        with pytest.raises(Refused, match="Unauthorized"):
            Accounts(api.store).user(wrong)


def test_the_certificate_is_valid_for_the_names_that_pods_use() -> None:
    import ssl

    certificate: Any = ssl._ssl._test_decode_cert(  # type: ignore[attr-defined]
        str(Path(__file__).parent / "certificates" / "server.crt")
    )
    names = {value for _, value in certificate["subjectAltName"]}
    assert {"localhost", "kubernetes.default.svc", "127.0.0.1"} <= names


def test_kubectl_tables_show_the_state_of_pods(api: Api) -> None:
    spec = {"containers": [{"name": "c", "image": "x:1"}]}
    pod = api.create(POD, {"metadata": {"name": "p", "namespace": "default"}, "spec": spec})
    pod["status"] = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "containerStatuses": [
            {
                "ready": False,
                "restartCount": 2,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            }
        ],
    }
    shown = table(POD, [pod], "7", api.timestamp(90))
    names = [column["name"] for column in shown["columnDefinitions"]]
    assert names == ["Name", "Ready", "Status", "Restarts", "IP", "Node", "Age"]
    assert shown["rows"][0]["cells"] == [
        "p", "0/1", "CrashLoopBackOff", 2, "10.0.0.1", "<none>", "90s",
    ]  # fmt: skip


def test_protobuf_of_typed_go_clients_is_decoded(api: Api) -> None:
    """The test encodes a Secret by hand: envelope, type, and fields by their numbers."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    def entry(key: str, value: bytes) -> bytes:
        return field(1, key.encode()) + field(2, value)

    labels = field(11, entry("owner", b"helm")) + field(11, entry("name", b"x"))
    metadata = field(1, b"s") + field(2, b"") + bytes([7 << 3, 5]) + labels
    secret = field(1, metadata) + field(2, entry("release", b"text")) + field(3, b"helm")
    kind = field(1, b"v1") + field(2, b"Secret")
    assert decode_object(MAGIC + field(1, kind) + field(2, secret)) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s", "labels": {"owner": "helm", "name": "x"}},
        "data": {"release": "dGV4dA=="},
        "type": "helm",
    }
    with pytest.raises(Refused, match="can't decode a v1 Sofa"):
        decode_object(MAGIC + field(1, field(1, b"v1") + field(2, b"Sofa")) + field(2, b""))
