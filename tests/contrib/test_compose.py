"""contrib/compose: what it starts is what swarmnode understands, and what it mounts is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command import ROOT
from tests.contrib.command_line import parse
from tests.contrib.script import CONTRIB, load
from tests.llama import save_llama
from tests.real.prometheus import needs_prometheus, promtool

FOLDER = CONTRIB / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ROLES = {name: service for name, service in SERVICES.items() if service["image"] == "swarmnode" and name != "create"}
WATCHED = {name: service for name, service in ROLES.items() if name != "page"}  # the others have metrics and layers


def interpolated(text: str) -> str:
    """As compose reads it where no variable is set: `${NAME:-default}` is its default, `$$` a dollar."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Source by target."""
    split = [interpolated(volume).split(":") for volume in service.get("volumes", [])]
    return {target: source for source, target, *_ in split}


def test_a_door_three_nodes_and_a_page() -> None:
    commands = [parse(list(map(interpolated, service["command"]))) for service in ROLES.values()]
    assert commands == ["host", "run", "run", "run", "serve"]


def test_the_page_is_for_this_machine_and_asks_for_a_key() -> None:
    page = SERVICES["page"]
    assert page["ports"] == ["127.0.0.1:8000:8000"] and "--keys" in page["command"]
    keys, invite = page["command"][page["command"].index("--keys") + 1], page["command"][1]
    assert keys in interpolated(SERVICES["create"]["command"][0]) and Path(keys).parent.as_posix() in mounts(page)
    assert Path(invite).parent.as_posix() in mounts(page) and "/health" in page["healthcheck"]["test"][-1]


def test_volumes_are_declared_and_files_are_there() -> None:
    sources = {source for service in SERVICES.values() for source in mounts(service).values()} - {"./models"}
    files = {source for source in sources if source.startswith(".")}
    assert sources - files == set(COMPOSE["volumes"])
    assert files and all((FOLDER / source).exists() for source in files)


def test_nodes_do_not_see_the_founders_file() -> None:
    assert [name for name, service in ROLES.items() if "founder" in mounts(service).values()] == ["bootstrap"]


def test_only_the_door_is_open_to_others() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == ["4001:4001"]


def test_a_node_has_time_to_leave() -> None:
    assert all(service["stop_grace_period"] == "30s" for service in ROLES.values())


def test_every_role_is_scraped_where_the_image_serves_metrics() -> None:
    _, image = load(CONTRIB / "docker" / "dockerfile.py").read(ROOT / "Dockerfile")
    port = image.last("ENV").pairs["SWARMNODE_METRICS_PORT"]
    listed = yaml.safe_load((FOLDER / "prometheus" / "compose.json").read_text())
    assert [entry["targets"] for entry in listed] == [[f"{name}:{port}"] for name in WATCHED]


@needs_prometheus
def test_prometheus_accepts_what_is_mounted(tmp_path: Path) -> None:
    for target, source in mounts(SERVICES["prometheus"]).items():
        if source.startswith("."):
            place = tmp_path / Path(target).relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (FOLDER / source).is_dir() else shutil.copy)(FOLDER / source, place)
    checked = promtool("check", "config", str(tmp_path / "etc/prometheus/prometheus.yml"))
    assert checked.returncode == 0 and "compose.json" not in checked.stderr, checked.stdout + checked.stderr
    assert "1 rule files found" in checked.stdout


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    mounted = mounts(SERVICES["grafana"])
    provisioning = FOLDER / mounted["/etc/grafana/provisioning"]
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in SERVICES
    [provider] = yaml.safe_load((provisioning / "dashboards" / "swarmnode.yaml").read_text())["providers"]
    dashboards = FOLDER / mounted[provider["options"]["path"]]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (dashboards / Path(home).name).is_file()


def test_the_gpu_file_changes_services_that_are_there() -> None:
    changed = yaml.safe_load((FOLDER / "compose.cuda.yaml").read_text())["services"]
    assert set(changed) == {name for name, service in ROLES.items() if service["command"][0] == "run"}


def test_create_founds_once(tmp_path: Path) -> None:
    """The script of the service, with the real command and a tiny checkpoint."""
    model = tmp_path / "model"
    save_llama(model, layers=2)
    [script] = SERVICES["create"]["command"]
    script = re.sub("/(invites|page)/", f"{tmp_path}/", interpolated(script))
    command = tmp_path / "bin" / "swarmnode"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m swarmnode.cli.main "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MODEL": str(model),
        "ANNOUNCE": "/ip4/203.0.113.7/tcp/4001",
    }
    for _ in range(2):  # as when the containers start again
        subprocess.run([*SERVICES["create"]["entrypoint"], script], cwd=tmp_path, env=environment, check=True)
    from swarmnode.gateway.access.keys import KeyFile
    from swarmnode.swarm.storage.swarmfile import load_swarm

    assert KeyFile(tmp_path / "keys").find((tmp_path / "key").read_text().strip())
    founded, invited = load_swarm(tmp_path / "friends.swarm"), load_swarm(tmp_path / "friends.invite")
    assert invited.id == founded.id and invited.bootstraps == founded.bootstraps
    assert [address.split("/p2p/")[0] for address in invited.bootstraps] == [
        f"/ip4/{SERVICES['bootstrap']['networks']['default']['ipv4_address']}/tcp/4001",
        "/ip4/203.0.113.7/tcp/4001",
    ]


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]])
def test_compose_accepts_it(files: list[str]) -> None:
    if (
        subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
        if shutil.which("docker")
        else 1
    ):
        pytest.skip("docker compose is not installed")
    options = [option for file in files for option in ("--file", str(FOLDER / file))]
    checked = subprocess.run(["docker", "compose", *options, "config", "--quiet"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
