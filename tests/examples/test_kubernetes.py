"""examples/kubernetes: the manifest is valid, and fits the server that it starts."""

from typing import Any

from slipstream.kv.blocks import BLOCK
from slipstream.server.app import OPEN
from tests.examples.served import documents, options

DEPLOYMENT, SERVICE, MONITOR = documents("kubernetes/slipstream.yaml")
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
SERVED = options(SERVER["args"])


def test_service_and_monitor_select_the_pods_and_name_their_port() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"] == labels
    assert MONITOR["spec"]["selector"]["matchLabels"] == labels
    (port,) = SERVER["ports"]
    (scraped,) = MONITOR["spec"]["podMetricsEndpoints"]
    assert port["name"] == SERVICE["spec"]["ports"][0]["targetPort"] == scraped["port"]
    assert port["containerPort"] == SERVED["port"]
    assert (MONITOR["apiVersion"], scraped["path"]) == ("monitoring.coreos.com/v1", "/metrics")


def test_the_monitor_has_the_key_probes_need_none_and_a_pod_has_time_to_end() -> None:
    (key,) = [each["valueFrom"]["secretKeyRef"] for each in SERVER["env"] if each["name"] == "SLIPSTREAM_API_KEY"]
    assert MONITOR["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"] == key
    probes = [SERVER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert {probe["path"] for probe in probes} <= set(OPEN)
    assert {probe["port"] for probe in probes} == {"http"}
    before = SERVER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] >= before + SERVED["grace_seconds"] + 5


def test_pods_are_confined_and_the_server_has_all_that_they_reserve() -> None:
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in (*POD["initContainers"], SERVER):
        confined = each["securityContext"]
        assert (confined["readOnlyRootFilesystem"], confined["allowPrivilegeEscalation"]) == (True, False)
        assert confined["capabilities"] == {"drop": ["ALL"]}
    assert SERVED["kv_tokens"] >= BLOCK
    assert SERVER["resources"]["limits"] == SERVER["resources"]["requests"]
    assert SERVED["host"] == "0.0.0.0"
