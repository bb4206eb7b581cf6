"""contrib/kubernetes: what it starts is what swarmnode understands, and what it refers to is there."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from swarmnode.config import ServerConfig, parse_bytes
from tests.contrib.command_line import parse
from tests.contrib.script import CONTRIB

FILE = CONTRIB / "kubernetes" / "node.yaml"
SERVICE, NODES = yaml.safe_load_all(FILE.read_text())
POD: dict[str, Any] = NODES["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_it_runs_a_node_that_lends_less_than_the_pod_has() -> None:
    assert parse(CONTAINER["args"]) == "run"
    lent = CONTAINER["args"][CONTAINER["args"].index("--memory") + 1]
    assert parse_bytes(lent, "--memory") < parse_bytes(CONTAINER["resources"]["limits"]["memory"], "limits")
    assert POD["terminationGracePeriodSeconds"] > ServerConfig().drain_s


def test_names_ports_and_volumes_fit() -> None:
    labels = NODES["spec"]["template"]["metadata"]["labels"]
    assert labels == NODES["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"]
    volumes = {each["name"] for each in POD["volumes"]}
    volumes |= {each["metadata"]["name"] for each in NODES["spec"]["volumeClaimTemplates"]}
    assert {each["name"] for each in CONTAINER["volumeMounts"]} == volumes
    (port,) = CONTAINER["ports"]
    assert SERVICE["spec"]["ports"] == [{"name": port["name"], "port": port["containerPort"]}]
    probes = CONTAINER["startupProbe"], CONTAINER["livenessProbe"]
    assert {probe["httpGet"]["port"] for probe in probes} == {port["name"]}


def test_the_schema_holds() -> None:
    if shutil.which("kubeconform") is None:
        pytest.skip("no kubeconform here")
    done = subprocess.run(["kubeconform", "-strict", str(FILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
