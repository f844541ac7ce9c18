"""The manifests, the dashboard and the unit: right by their schemas, and true to what the gateway reads and tells."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from greenroom import __version__
from greenroom.api.front import HostRule
from greenroom.cli.parser import parser
from greenroom.config import environment, loader
from greenroom.config.schema import Config, Server
from greenroom.features.versions.cli_trainer import FILE_NAME, HOST_NAME, SERVICE_NAME
from greenroom.runtime.timeouts import STOP_MAX_S
from greenroom.telemetry import table
from greenroom.telemetry.table import MetricSpec
from tests.deploy.kustomize import KUBERNETES, Object, real_kustomize, render

FOLDERS = [KUBERNETES / "base", *sorted((KUBERNETES / "overlays").iterdir())]

# Of the Prometheus Operator, not of Kubernetes.
FOREIGN = {"ServiceMonitor"}
KEYS = {name: f"gr-{name.lower()}-0123456789abcdef" for name in ("ADMIN", "CLIENT", "METRICS")}
SECRET = {f"GREENROOM_{name}_KEY": key for name, key in KEYS.items()}


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def pods(objects: list[Object]) -> Iterator[Object]:
    for one in objects:
        if one["kind"] == "Deployment":
            yield one["spec"]["template"]["spec"]


def container(pod: Object) -> Object:
    (only,) = pod["containers"]
    return only


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(request.param)


@pytest.fixture(scope="module")
def base() -> list[Object]:
    return render(KUBERNETES / "base")


def configured(base: list[Object], folder: Path) -> Config:
    """The configuration as the gateway in a pod reads it."""
    file = folder / "greenroom.yaml"
    file.write_text(named(base, "ConfigMap", "inference-config")["data"]["greenroom.yaml"])
    environ = {**named(base, "ConfigMap", "inference-environment")["data"], **SECRET, "POD_NAMESPACE": "greenroom"}
    return loader.load(file, environ, to_serve=True).config


# --- right by schema ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.30", "1.33"])
def test_every_object_is_right_by_the_schema(objects: list[Object], version: str) -> None:
    for one in objects:
        if one["kind"] not in FOREIGN:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.skipif(real_kustomize() is None, reason="neither kustomize nor kubectl is here")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kustomize_renders_the_same(folder: Path) -> None:
    command = real_kustomize() or []
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    theirs = list(yaml.safe_load_all(re.sub(r"(-(?:environment|config))-[a-z0-9]{10}\b", r"\1", done.stdout)))
    assert sorted(theirs, key=identity) == sorted(render(folder), key=identity)


def identity(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def test_every_name_in_a_pod_names_something(objects: list[Object]) -> None:
    there = {identity(one) for one in objects} | {("Secret", "greenroom-keys")}
    for pod in pods(objects):
        used = {("ServiceAccount", pod["serviceAccountName"])}
        for source in container(pod)["envFrom"]:
            used |= {("ConfigMap" if kind == "configMapRef" else "Secret", ref["name"]) for kind, ref in source.items()}
        for variable in container(pod)["env"]:
            if "configMapKeyRef" in variable["valueFrom"]:
                ref = variable["valueFrom"]["configMapKeyRef"]
                assert ref["key"] in named(objects, "ConfigMap", ref["name"])["data"]
        for volume in pod["volumes"]:
            if "configMap" in volume:
                used.add(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                used.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        assert used <= there
        mounted = {mount["name"] for mount in container(pod)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_labels_and_ports_that_select_are_those_of_the_pods(objects: list[Object]) -> None:
    labels = named(objects, "Deployment", "inference")["spec"]["template"]["metadata"]["labels"]
    ports = {
        port["name"]
        for port in container(named(objects, "Deployment", "inference")["spec"]["template"]["spec"])["ports"]
    }
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] == "Service":
            assert spec["selector"].items() <= labels.items()
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        if one["kind"] == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"].items() <= labels.items()
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= ports
        if one["kind"] == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"].items() <= labels.items()
        if one["kind"] == "ServiceMonitor":
            service = named(objects, "Service", "inference")
            assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            assert {end["port"] for end in spec["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
            assert {end["authorization"]["credentials"]["key"] for end in spec["endpoints"]} <= set(SECRET)


# --- what was asked for ---------------------------------------------------------------------------------------------


def test_one_gpu_has_one_replica_that_can_be_replaced_and_drained() -> None:
    objects = render(KUBERNETES / "overlays" / "one-gpu")
    spec = named(objects, "Deployment", "inference")["spec"]
    assert spec["replicas"] == 1 and spec["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert "PodDisruptionBudget" not in {one["kind"] for one in objects}


def test_the_trainer_keeps_every_replica_at_the_weights_it_is_told() -> None:
    objects = render(KUBERNETES / "overlays" / "trainer")
    words = container(named(objects, "Deployment", "trainer")["spec"]["template"]["spec"])["args"]
    said = parser().parse_args(words)
    assert (words, said.sync, said.replica) == (["trainer", "keep"], "api", None)
    environ = named(objects, "ConfigMap", "trainer-environment")["data"]
    # The replicas are found by a Service without an address of its own, on the port of the other one.
    assert named(objects, "Service", environ[HOST_NAME])["spec"]["clusterIP"] == "None"
    assert environ[SERVICE_NAME].endswith(":8000") and environ[FILE_NAME].startswith("/models/")


def test_no_pod_has_rights_or_writes_to_its_root(objects: list[Object]) -> None:
    assert not {one["kind"] for one in objects} & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Secret"}
    for pod in pods(objects):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        context = container(pod)["securityContext"]
        assert context["readOnlyRootFilesystem"] is True and context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container(pod)["image"] == f"greenroom:{__version__}"


# --- true to the gateway --------------------------------------------------------------------------------------------


def test_environment_holds_only_what_the_gateway_reads(objects: list[Object]) -> None:
    known = {row.name for row in environment.TABLE}
    assert set(named(objects, "ConfigMap", "inference-environment")["data"]) <= known


def test_every_replica_has_the_mapped_model_under_version_control(objects: list[Object], tmp_path: Path) -> None:
    repo_id = named(objects, "ConfigMap", "inference-environment")["data"]["MODEL_REPO_ID"]
    ((name, model),) = configured(objects, tmp_path).models.items()
    # The default image has llama.cpp alone.
    assert (name, model.engine, model.versions and model.versions.repo_id) == (repo_id, "llamacpp", repo_id)


def test_the_configuration_loads_and_knows_the_names_of_the_service(base: list[Object], tmp_path: Path) -> None:
    config = configured(base, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container(next(pods(base)))["ports"]}
    assert (config.server.port, config.server.metrics_port) == (ports["http"], ports["metrics"])
    rule = HostRule([*config.server.allowed_hosts, config.server.host])
    service = named(base, "Service", "inference")
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    for host in (name, f"{name}.{namespace}", f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.cluster.local"):
        rule.check(f"{host}:8000".encode(), None)
    # The kubelet's probes.
    rule.check(b"10.1.2.3:8000", None)


def test_state_is_never_on_the_shared_volume_and_models_are(base: list[Object], tmp_path: Path) -> None:
    pod = next(pods(base))
    kinds = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: kinds[mount["name"]] for mount in container(pod)["volumeMounts"]}
    args: list[str] = container(pod)["args"]
    state_dir = args[args.index("--state-dir") + 1]
    assert "emptyDir" in mounts[str(Path(state_dir).parent)]
    for root in configured(base, tmp_path).roots:
        (place,) = (path for path in mounts if root.startswith(path + "/"))
        assert mounts[place]["persistentVolumeClaim"]["claimName"] == "model-storage"


def test_a_pod_has_time_to_drain(base: list[Object], tmp_path: Path) -> None:
    pod = next(pods(base))
    before_s = container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before_s + configured(base, tmp_path).server.drain_s + STOP_MAX_S


def test_the_autoscaler_follows_a_metric_that_there_is() -> None:
    folder = KUBERNETES / "overlays" / "replicas"
    (metric,) = named(render(folder), "HorizontalPodAutoscaler", "inference")["spec"]["metrics"]
    rule = (folder / "README.md").read_text()
    assert f"as: {metric['pods']['metric']['name']}}}" in rule
    assert f"rate({table.WAIT_SECONDS.name}_sum{{" in rule and f"rate({table.WAIT_SECONDS.name}_count{{" in rule


BOARD: dict[str, Any] = json.loads((Path(__file__).resolve().parents[2] / "deploy" / "grafana.json").read_text())
SPECS = {spec.name: spec for spec in vars(table).values() if isinstance(spec, MetricSpec)}

# Prometheus adds these: to every series, and to those of a histogram.
ADDED = {"instance", "job", "le"}


def _panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in BOARD["panels"] if panel["type"] != "row")


def _questions() -> list[str]:
    variables = [one["query"]["query"] for one in BOARD["templating"]["list"] if one["type"] == "query"]
    return variables + [target["expr"] for panel in _panels() for target in panel["targets"]]


def _spec(name: str) -> MetricSpec | None:
    """The metric of a series; the series of a histogram have endings."""
    plain = re.sub(r"_(bucket|sum|count)$", "", name)
    found = SPECS.get(name) or SPECS.get(plain)
    return found if found is None or name == found.name or found.buckets else None


@pytest.mark.parametrize("asked", _questions())
def test_every_question_is_about_metrics_and_labels_that_there_are(asked: str) -> None:
    names = set(re.findall(r"greenroom_\w+", asked))
    specs = [_spec(name) for name in names]
    assert names and None not in specs, asked
    labels = set(re.findall(r"(\w+)\s*=~?\s*\"", asked))
    for group in re.findall(r"by \(([^)]*)\)", asked):
        labels |= {label.strip() for label in group.split(",")}
    known = ADDED.union(*(spec.labels for spec in specs if spec is not None))
    assert labels <= known, asked


def test_panels_lie_beside_each_other_and_show_what_was_asked_for() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + right, place["y"] + down) for right in range(place["w"]) for down in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    labels = {
        label
        for panel in _panels()
        for one in panel["targets"]
        for label in re.findall(r"{{(\w+)}}", one["legendFormat"])
    }
    assert labels <= {label for spec in SPECS.values() for label in spec.labels}


def test_no_source_of_data_is_built_in() -> None:
    sources = {target["datasource"]["uid"] for panel in _panels() for target in panel["targets"]}
    assert sources == {"${datasource}"}


ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "systemd" / "greenroom.service").read_text()

# From 0 (safe) to 10; 9.4 without any hardening.
EXPOSURE_MAX = 4.0
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")


def directive(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return value


def analyzed(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What systemd-analyze says of this unit, whose program is one that is here."""
    unit = folder / "greenroom.service"
    unit.write_text(text.replace("/opt/greenroom/bin/greenroom", sys.executable))
    return subprocess.run(
        ["systemd-analyze", *words, str(unit)], capture_output=True, text=True, timeout=60, check=False
    )


@needs_systemd
def test_systemd_knows_every_directive(tmp_path: Path) -> None:
    done = analyzed(tmp_path, UNIT, "verify", "--man=no")
    assert (done.returncode, done.stderr) == (0, "")
    # It tells a wrong one.
    wrong = analyzed(tmp_path, UNIT.replace("NoNewPrivileges=", "NoNewPrivilege="), "verify", "--man=no")
    assert "NoNewPrivilege" in wrong.stderr


@needs_systemd
def test_the_service_is_well_shut_off(tmp_path: Path) -> None:
    done = analyzed(tmp_path, UNIT, "security", "--offline=true", "--no-pager")
    found = re.search(r"Overall exposure level for greenroom.service: ([0-9.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) <= EXPOSURE_MAX


def test_its_command_is_understood_and_its_state_is_where_it_may_write() -> None:
    args = parser().parse_args(shlex.split(directive("ExecStart"))[1:])
    assert args.state_dir.startswith(f"/var/lib/{directive('StateDirectory')}/")


def test_it_has_time_to_drain() -> None:
    assert int(directive("TimeoutStopSec")) > Server().drain_s + STOP_MAX_S
