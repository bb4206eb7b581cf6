"""Version and distribution of this installation, and the commands that update it and add optional packages to it."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from pathlib import Path

__version__ = "0.1.0"
DISTRIBUTION = "swarmnode-p2p"  # `swarmnode` on PyPI is another project
OPTIONAL = {
    "mcp": "mcp>=2,<3",
    "xllamacpp": "xllamacpp>=2026.10,<2027",
    "triton": "triton>=3",
    "pyarrow": "pyarrow>=18",
    "zstandard": "zstandard>=0.22",
    "tensorboard": "tensorboard>=2.18",
}  # requirements as in pyproject.toml; xllamacpp is a dependency wherever it has a wheel
IN_DOCKER = Path("/.dockerenv")
REBUILD = "# build the image again, in a newer checkout (docs/operator.md)"
UV_TOOL, PIPX = "uv-receipt.toml", "pipx_metadata.json"  # files that the tools leave in an environment of theirs


def missing_package(name: str) -> str:
    """Return the sentence that the package `name` of OPTIONAL is missing, with the command that adds it."""
    return f"the Python package {name} is missing: {install_command(name)}"


def install_command(name: str) -> str:
    """Return the shell command that adds the package `name` of OPTIONAL to this installation: that of the tool that made it (pipx,
    uv or pip), or a comment for an image of Docker, which is built again."""
    if _is_made_by(PIPX):
        return shlex.join(["pipx", "inject", Path(sys.prefix).name, OPTIONAL[name]])
    if _is_image():
        return REBUILD
    return _pip("install", OPTIONAL[name])


def update_command() -> str:
    """Return the shell command that updates this installation: that of the tool that installed it (uv, pipx or pip), after `git
    pull` if it was installed from a checkout."""
    source, editable = _source()
    steps = [shlex.join(["git", "-C", source, "pull"])] if source and (Path(source) / ".git").exists() else []
    if editable:
        return " && ".join(steps) or f"# put the newer source into {source}"
    if _is_made_by(UV_TOOL):
        steps.append(f"uv tool upgrade {DISTRIBUTION}")
    elif _is_made_by(PIPX):
        steps.append(f"pipx upgrade {DISTRIBUTION}")
    elif _is_image():
        return REBUILD
    else:
        steps.append(_pip("install", "--upgrade", source or DISTRIBUTION))
    return " && ".join(steps)


def _source() -> tuple[str, bool]:
    """Return the folder or address that this installation came from, empty for an index of packages, and whether Python imports it
    from there."""
    import json
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return str(Path(__file__).parents[1]), True
    if text is None:
        return "", False
    origin = json.loads(text)  # PEP 610
    if version_control := origin.get("vcs_info"):
        revision = version_control.get("requested_revision")
        return f"{version_control['vcs']}+{origin['url']}" + (f"@{revision}" if revision else ""), False
    url = urlsplit(origin["url"])
    if url.scheme != "file":
        return origin["url"], False
    return url2pathname(url.path), bool(origin.get("dir_info", {}).get("editable"))


def _is_made_by(tool: str) -> bool:
    return (Path(sys.prefix) / tool).is_file()


def _is_image() -> bool:
    """Return whether this is an image of Docker without a tool that installs packages, as ours."""
    return IN_DOCKER.exists() and not _has_pip() and shutil.which("uv") is None


def _pip(*arguments: str) -> str:
    """Return a shell command of this interpreter's pip; of uv's if the interpreter has none, as in an environment that uv
    made."""
    if _has_pip():
        return shlex.join([sys.executable, "-m", "pip", *arguments])
    return shlex.join(["uv", "pip", arguments[0], "--python", sys.executable, *arguments[1:]])


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None
