"""GGUF files of models on the Hugging Face hub: organisation/model:QUANT, as Ollama and llama.cpp take it, also after `hf.co/`.

A quant is the part of the files' names that tells their number formats, as Q4_K_M or UD-Q4_K_XL. A split model counts once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from swarmnode.compute.model.hub import Repository, copy_beginning
from swarmnode.errors import UsageError
from swarmnode.swarm.storage.content import GGUF_SUFFIX

MAX_TOLD = 12  # quants in an error
_HOSTS = re.compile(r"(https?://)?(www\.)?(hf\.co|huggingface\.co)/")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:IQ\d|TQ\d|Q\d)\w*|MXFP4(?:_MOE)?|BF16|FP?16|FP?32)(?=[-.]|$)", re.IGNORECASE
)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True)
class HubGguf:
    """GGUF model of a repository on the hub: its files by name, in the order of their parts, at a commit."""

    repository: Repository
    files: tuple[str, ...]

    def fetch(self) -> Path:
        """Fetch the files, check them, and return the path of the first one. Raises CheckpointError."""
        first, *_ = [self.repository.fetch_whole(file) for file in self.files]
        return first

    def fetch_beginnings(self, size: int, folder: Path) -> Path:
        """Write the first `size` bytes of each file into `folder`, and return the path of the first one. Raises CheckpointError."""
        name, revision = self.repository.name, self.repository.revision
        first, *_ = [copy_beginning(name, file, size, folder, revision=revision) for file in self.files]
        return first


def find_on_hub(model: str) -> HubGguf | None:
    """Return the GGUF model on the hub that the user names; None if the text has another form.

    Forms: organisation/model:QUANT, organisation/model/FILE.gguf, and both with @revision or after hf.co/, where a repository with
    one GGUF model needs no quant. Raises UsageError, with the repository's quants, if the name fits none or several;
    CheckpointError if the hub does not answer.
    """
    on_hub = _HOSTS.match(model)
    text, _, revision = model[on_hub.end() if on_hub else 0 :].partition("@")
    text, _, quant = text.rstrip("/").partition(":")
    organisation, _, rest = text.partition("/")
    name, _, file = rest.partition("/")
    is_form = bool(quant) != bool(file) or (on_hub is not None and not file)
    if not is_form or not _NAME.fullmatch(f"{organisation}/{name}") or (file and not file.endswith(GGUF_SUFFIX)):
        return None
    repository = Repository(f"{organisation}/{name}", revision=revision or None)
    models = _models(repository.files)
    if not models and on_hub is not None and not quant:
        return None  # safetensors
    chosen = [key for key in models if file in models[key]] if file else _matching(models, quant)
    if len(chosen) != 1:
        raise UsageError(_advice(repository.name, models, quant or file, chosen))
    return HubGguf(repository, models[chosen[0]])


def _models(files: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return the files of each GGUF model, by their common name without parts and suffix. Projectors of images are left out."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(GGUF_SUFFIX) and "mmproj" not in file.lower():
            found.setdefault(_SPLIT.sub("", file.removesuffix(GGUF_SUFFIX)), []).append(file)
    return {key: tuple(names) for key, names in found.items()}


def _label(key: str) -> str:
    """Return the quant of a model's name; the name if it tells none."""
    quants = _QUANT.findall(key.rpartition("/")[2])
    return str(quants[-1]) if quants else f"{key.rpartition('/')[2]}{GGUF_SUFFIX}"


def _matching(models: dict[str, tuple[str, ...]], quant: str) -> list[str]:
    """Return the models of a quant; without a quant all. A quant is compared without case, as a whole first, else with the end of
    the name."""
    if not quant:
        return list(models)
    wanted = quant.lower()
    exact = [key for key in models if _label(key).lower() == wanted or wanted in map(str.lower, models[key])]
    return exact or [key for key in models if re.search(rf"[-._/]{re.escape(wanted)}$", key.lower())]


def _advice(name: str, models: dict[str, tuple[str, ...]], asked: str, chosen: list[str]) -> str:
    """Return the error of a choice of none or several models."""
    if not models:
        return f"{name}: has no GGUF files; leave out :{asked}, or choose another repository"
    if chosen and len({_label(key) for key in chosen}) < len(chosen):
        options = [f"{name}/{models[key][0]}" for key in chosen]  # only their names differ
    else:
        options = [f"{name}:{_label(key)}" for key in chosen or models]
    told = ", ".join(options[:MAX_TOLD]) + (f" and {len(options) - MAX_TOLD} more" if len(options) > MAX_TOLD else "")
    if chosen:
        return f"{name}: has {len(chosen)} GGUF models {f'of {asked}' if asked else ''}: give one of {told}".replace(
            " :", ":"
        )
    return f"{name}: has no GGUF model {asked[:64]!r}; there are {told}"
