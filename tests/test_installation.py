"""Commands that install and update swarmnode and its optional packages, and the texts that advise them."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from swarmnode import version
from swarmnode.cli.options.file_options import read_toml
from tests.cli.command import ROOT, invoke

TEXTS = [
    *(ROOT / "swarmnode").rglob("*.py"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "contrib").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "Dockerfile",
]
# The name belongs to another project there, and ours is not published: a stranger could take it.
FROM_INDEX = re.compile(r"(?:pipx?3?|uv tool|uv pip) install(?:\s+-[\w-]+)*\s+['\"]?swarmnode|swarmnode(?:-p2p)?\[")


def test_no_text_advises_to_install_another_project() -> None:
    assert FROM_INDEX.search("pip install 'swarmnode[gguf]'") and FROM_INDEX.search("pip install --upgrade swarmnode")
    assert FROM_INDEX.search("pipx install swarmnode-p2p") and not FROM_INDEX.search("pipx install .")
    found = {path.name: hit[0] for path in TEXTS if (hit := FROM_INDEX.search(path.read_text())) is not None}
    assert found == {}


def test_the_project_file_has_the_same_names() -> None:
    project = read_toml(None, ROOT / "pyproject.toml", what="TOML")["project"]
    assert project["name"] == version.DISTRIBUTION and project["scripts"].keys() == {"swarmnode"}
    asked = {each.partition(";")[0] for each in project["dependencies"]}
    asked |= {each for extra in project["optional-dependencies"].values() for each in extra}
    assert asked >= {*version.OPTIONAL.values()}


@pytest.mark.parametrize(
    ("system", "machine", "has"),
    [
        *((system, "x86_64", True) for system in ("linux", "darwin")),
        *(("linux", machine, machine == "aarch64") for machine in ("aarch64", "armv7l", "riscv64", "ppc64le", "x86")),
        *(
            ("darwin", "arm64", True),
            ("win32", "AMD64", True),
            ("win32", "ARM64", False),
            ("freebsd14", "amd64", False),
        ),
        ("linux", "", False),
    ],
)
def test_ggml_is_installed_where_it_has_a_wheel(system: str, machine: str, has: bool) -> None:
    """Wheels of xllamacpp 2026.10: cp310-abi3 for manylinux2014 and macOS 13 on two processors each, and for Windows on one."""
    project = read_toml(None, ROOT / "pyproject.toml", what="TOML")["project"]
    markers = [
        requirement.marker
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "xllamacpp"
    ]
    here = {"sys_platform": system, "platform_machine": machine}
    assert sum(marker is not None and marker.evaluate(here) for marker in markers) == has


def test_a_missing_package_is_named_with_the_interpreter_that_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/home/me/my tools/python")
    command = version.missing_package("xllamacpp").partition(": ")[2]
    assert shlex.split(command) == ["/home/me/my tools/python", "-m", "pip", "install", version.OPTIONAL["xllamacpp"]]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(version, "IN_DOCKER", tmp_path / "no")
    command = version.missing_package("mcp").partition(": ")[2]
    assert shlex.split(command)[:5] == ["uv", "pip", "install", "--python", sys.executable]
    monkeypatch.setattr(version, "IN_DOCKER", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/uv")
    assert version.install_command("mcp").startswith("uv pip install")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert version.install_command("mcp").startswith("# build the image again")
    environment = tmp_path / "swarmnode-p2p-next"  # of `pipx install --suffix -next`
    environment.mkdir()
    monkeypatch.setattr(sys, "prefix", str(environment))
    (environment / version.PIPX).touch()
    command = version.missing_package("mcp").partition(": ")[2]
    assert shlex.split(command) == ["pipx", "inject", "swarmnode-p2p-next", version.OPTIONAL["mcp"]]


@pytest.mark.parametrize(
    ("tool", "origin", "expected"),
    [
        ("", None, "{python} -m pip install --upgrade swarmnode-p2p"),
        (
            "",
            {"url": "file:///srv/swarm%20node", "dir_info": {}},
            "{python} -m pip install --upgrade '/srv/swarm node'",
        ),
        ("", {"url": "file:///srv/node", "dir_info": {"editable": True}}, "# put the newer source into /srv/node"),
        (
            "",
            {"url": "https://git.example/node", "vcs_info": {"vcs": "git", "requested_revision": "main"}},
            "{python} -m pip install --upgrade git+https://git.example/node@main",
        ),
        (version.PIPX, None, "pipx upgrade swarmnode-p2p"),
        (version.PIPX, {"url": "file:///srv/node"}, "pipx upgrade swarmnode-p2p"),
        (version.UV_TOOL, None, "uv tool upgrade swarmnode-p2p"),
        (version.UV_TOOL, {"url": "file:///srv/node"}, "uv tool upgrade swarmnode-p2p"),
    ],
)
def test_an_update_is_for_the_tool_that_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, origin: Any, expected: str
) -> None:
    """Installations as pip, pipx and uv leave them: a file in the environment, and PEP 610's record of the origin."""
    (tmp_path / (tool or "other")).touch()
    folder = tmp_path / f"{version.DISTRIBUTION.replace('-', '_')}-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {version.DISTRIBUTION}\nVersion: 1\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.Distribution.at(folder))
    assert version.update_command() == expected.format(python=shlex.quote(sys.executable))


def test_a_checkout_is_pulled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(version, "_source", lambda: (str(tmp_path), True))
    assert version.update_command() == f"git -C {tmp_path} pull"
    told = invoke("update").stdout
    assert f"git -C {tmp_path} pull" in told and version.__version__ in told


def test_the_version_is_told_by_the_word_too() -> None:
    assert invoke("version").stdout == invoke("--version").stdout == f"swarmnode {version.__version__}\n"
