"""examples/docker: the image, and the metrics that Prometheus and its alerts read."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from slipstream import __version__
from slipstream.core.stats import SpecStats
from slipstream.server.app import OPEN
from slipstream.server.server_metrics import ServerMetrics
from tests.examples.served import EXAMPLES, documents, options

DOCKER, ROOT = EXAMPLES / "docker", EXAMPLES.parent
(COMPOSE,) = documents("docker/compose.yaml")
(PROMETHEUS,) = documents("docker/prometheus.yml")
(ALERTS,) = documents("docker/alerts.yml")
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) of the Dockerfile."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_the_image_holds_what_the_tests_ran_with() -> None:
    commands = dict.fromkeys(rest for name, rest in instructions() if name == "RUN")
    torch = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert torch
    assert any(torch.group(1) in each and "--constraint constraints.txt" in each for each in commands)
    copied = {part for name, rest in instructions() if name == "COPY" for part in rest.split()[:-1]}
    assert all((ROOT / part).exists() for part in copied)
    assert COMPOSE["services"]["slipstream"]["image"] == f"slipstream:{__version__}"


def test_the_image_serves_as_a_user_that_owns_the_compiled_kernels() -> None:
    steps = instructions()
    names = [name for name, _ in steps]
    user = dict(steps)["USER"]
    assert user == "10001"
    compiles = next(i for i, (name, rest) in enumerate(steps) if name == "RUN" and "slipstream generate" in rest)
    assert names.index("USER") < compiles
    assert names.index("ENV") < compiles
    assert dict(steps)["ENV"] == "NUMBA_CACHE_DIR=/kernels"
    assert options(json.loads(dict(steps)["CMD"]))["host"] == "0.0.0.0"


def test_the_health_check_needs_no_key_and_compose_gives_the_server_time_to_end() -> None:
    (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", dict(instructions())["HEALTHCHECK"])
    assert path in OPEN
    served = options(COMPOSE["services"]["slipstream"]["command"])
    assert int(COMPOSE["services"]["slipstream"]["stop_grace_period"].removesuffix("s")) > served["grace_seconds"] + 5


def test_compose_mounts_files_that_exist_opens_local_ports_and_starts_again_what_ends() -> None:
    for name, service in COMPOSE["services"].items():
        for source in (volume.split(":")[0] for volume in service["volumes"]):
            assert source.startswith("${") or (DOCKER / source).is_file(), name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert all(each["source"] in COMPOSE["configs"] for each in service.get("configs", ()))
    served = COMPOSE["services"]["slipstream"]
    assert (served["restart"], served["cap_drop"]) == ("unless-stopped", ["ALL"])
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["slipstream:8000"]}]
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_read_metrics_and_labels_that_the_server_has(rule: dict[str, Any]) -> None:
    metrics = ServerMetrics("m")
    metrics.count_choice("error", 1, 1, SpecStats(steps=2, proposed=2, accepted=1, accepted_at=Counter({1: 1})))
    samples = {sample.name: sample.labels for family in metrics.registry.collect() for sample in family.samples}
    named = re.findall(r"\bslipstream:\w+", rule["expr"])
    assert set(named) <= set(samples)
    assert named or rule["expr"] == f'up{{job="{PROMETHEUS["scrape_configs"][0]["job_name"]}"}} == 0'
    for name, label, value in re.findall(r'(slipstream:\w+){(\w+)="(\w+)"}', rule["expr"]):
        assert samples[name][label] == value
    for labels in re.findall(r"by \(([\w, ]+)\)", rule["expr"]):
        assert set(labels.split(", ")) <= {"model_name", "le"}
    assert rule["annotations"]["summary"]
