"""examples/kubernetes: the manifests are valid, and fit the servers that they start."""

import json
from typing import Any

import pytest

from slipstream.kv.blocks import BLOCK
from slipstream.measure.configs import DrafterChoice, vllm
from slipstream.measure.vllm_server import OLDEST, TOO_NEW
from slipstream.server.app import OPEN
from tests.examples.served import EXAMPLES, documents, options

CLAIM, DEPLOYMENT, SERVICE, BUDGET, MONITOR = documents("kubernetes/slipstream.yaml")
VLLM = documents("kubernetes/vllm.yaml")
(POOL,) = documents("kubernetes/inference-pool.yaml")
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


def test_every_replica_can_mount_the_models_and_one_is_left_while_nodes_are_drained() -> None:
    (models,) = [each for each in POD["volumes"] if each["name"] == "models"]
    assert models["persistentVolumeClaim"] == {"claimName": CLAIM["metadata"]["name"], "readOnly": True}
    assert CLAIM["spec"]["accessModes"] == ["ReadOnlyMany"]
    for budget, deployment in ((BUDGET, DEPLOYMENT), (VLLM[2], VLLM[0])):
        assert (budget["apiVersion"], budget["kind"]) == ("policy/v1", "PodDisruptionBudget")
        assert budget["spec"]["selector"] == deployment["spec"]["selector"]
        assert budget["spec"]["maxUnavailable"] < deployment["spec"]["replicas"]


@pytest.mark.parametrize("name", ["slipstream.yaml", "vllm.yaml"])
def test_what_needs_a_newer_kubernetes_is_said(name: str) -> None:
    text = (EXAMPLES / "kubernetes" / name).read_text(encoding="utf-8")
    assert "sleep: {seconds:" in text
    assert "Kubernetes 1.30 or newer" in text


def test_a_pool_selects_the_pods_and_tells_which_argument_makes_its_picker_see_them() -> None:
    assert POOL["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]
    assert POOL["spec"]["targetPorts"] == [{"number": SERVED["port"]}]
    text = (EXAMPLES / "kubernetes" / "inference-pool.yaml").read_text(encoding="utf-8")
    assert options([*SERVER["args"], "--metrics-prefix=vllm"])["metrics_prefix"] == "vllm"
    assert "--metrics-prefix=vllm" in text
    assert "/metrics" not in OPEN, "the picker has no key"
    assert "remove SLIPSTREAM_API_KEY" in text


def test_vllm_with_the_plug_in_has_the_settings_that_we_write_for_it_and_a_version_that_has_the_door() -> None:
    deployment, service, _, monitor = VLLM
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    settings = dict(each.removeprefix("--").split("=", 1) for each in server["args"])
    written = vllm(DrafterChoice("suffix", 16, "/models/target")).values
    assert written is not None
    for name, value in written.items():
        assert json.loads(settings[name.replace("_", "-")]) == value
    version = tuple(map(int, server["image"].rsplit(":", 1)[1].split(".")[:2]))
    assert OLDEST <= version < TOO_NEW
    assert f"FROM vllm/vllm-openai:v{server['image'].rsplit(':', 1)[1]}" in (
        EXAMPLES / "kubernetes" / "vllm.yaml"
    ).read_text(encoding="utf-8")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert monitor["spec"]["selector"]["matchLabels"] == labels
