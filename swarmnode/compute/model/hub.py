"""Checkpoints by their name on the Hugging Face hub: small files first, then only the shards that a span needs.

Sizes of all units are known before any weights are fetched: the headers of remote safetensors files are read by range.

GGUF files of models on the Hugging Face hub: organisation/model:QUANT, as Ollama and llama.cpp take it, also after `hf.co/`.

A quant is the part of the files' names that tells their number formats, as Q4_K_M or UD-Q4_K_XL. A split model counts once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode.compute.model.checkpoint import CONFIG_FILE, Checkpoint, read_header
from swarmnode.compute.packing.tensor_entry import TensorEntry
from swarmnode.errors import CheckpointError, UsageError
from swarmnode.swarm.records.manifest import is_hub_name
from swarmnode.swarm.storage.content import GGUF_SUFFIX, TOKENIZER_NAMES

SMALL_FILES = TOKENIZER_NAMES | {CONFIG_FILE, "generation_config.json"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
LOGIN = "log in (`hf auth login`, or HF_TOKEN)"


def open_checkpoint(
    name: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None
) -> Checkpoint:
    """Open a checkpoint in a local folder, or by its hub name, as "organisation/model" or "organisation/model@revision".

    A revision (a branch, a tag or a commit) in `name` is used unless `revision` is given; without any it is the newest. Raises
    CheckpointError if there is no such folder or model, or it is not a checkpoint.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return Checkpoint(path)
    if path.is_file():
        raise CheckpointError(
            f"{name}: not a folder with a checkpoint (`create` and `host` can make one from a GGUF file)"
        )
    repository, _, named = str(name).partition("@")
    if path.is_absolute() or str(name).startswith((".", "~")) or repository.count("/") > 1:
        raise CheckpointError(f"{name}: no such folder; check its name")
    return HubCheckpoint(repository, revision=revision or named or None, cache_dir=cache_dir)


class Repository:
    """Model repository `name` on the hub, at the commit of `revision`. Raises CheckpointError if the hub does not have it."""

    def __init__(
        self,
        name: str,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        endpoint: str | None = None,
    ) -> None:
        from huggingface_hub import HfApi

        self.name = name
        self.api = HfApi(endpoint=endpoint)
        self._cache_dir = cache_dir
        self._whole: set[str] = set()
        _check_name(name, revision)
        with _hub_errors(name, revision):
            info = self.api.model_info(name, revision=revision)
        self.revision = info.sha or revision
        self.files = frozenset(sibling.rfilename for sibling in info.siblings or ())

    def fetch(self, file: str) -> Path:
        """Fetch a file into the cache of huggingface_hub, and return its path. Raises CheckpointError."""
        with _hub_errors(self.name, self.revision):
            return Path(self.api.hf_hub_download(self.name, file, revision=self.revision, cache_dir=self._cache_dir))

    def fetch_whole(self, file: str) -> Path:
        """Fetch a large file and check it once against the SHA-256 that the hub promised.

        Raises CheckpointError, after it removed the file, if it is damaged.
        """
        path = self.fetch(file)
        blob = path.resolve()
        if file not in self._whole and _SHA256.fullmatch(blob.name) and _sha256_of(blob) != blob.name:
            for damaged in (path, blob):
                damaged.unlink()
            raise CheckpointError(f"{self.name}: {file} was damaged on its way here and is removed: try again")
        self._whole.add(file)
        return path


class HubCheckpoint(Checkpoint):
    """Checkpoint whose shards are fetched from the hub (with a progress bar) when their tensors are first opened."""

    def __init__(
        self,
        repository: str,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        endpoint: str | None = None,
    ) -> None:
        self._hub = Repository(repository, revision=revision, cache_dir=cache_dir, endpoint=endpoint)
        self.repository, self.revision = repository, self._hub.revision
        for file in sorted(SMALL_FILES & self._hub.files):
            self.path = self._hub.fetch(file).parent
        if CONFIG_FILE not in self._hub.files:
            has_gguf = any(file.endswith(GGUF_SUFFIX) for file in self._hub.files)
            hint = f"; for its GGUF files give hf.co/{repository}, or {repository}:QUANT" if has_gguf else ""
            raise CheckpointError(f"{repository}: has no {CONFIG_FILE}, so it is not a model of transformers{hint}")
        with _hub_errors(repository, self.revision):
            metadata = self._hub.api.get_safetensors_metadata(repository, revision=self.revision)
        entries: dict[str, TensorEntry] = {}
        for file, header in metadata.files_metadata.items():
            for name, tensor in header.tensors.items():
                begin, end = tensor.data_offsets
                entries[name] = TensorEntry(self.path / file, tensor.dtype, tuple(tensor.shape), begin, end)
        self._set_entries(entries)

    def __repr__(self) -> str:
        return f"HubCheckpoint({self.repository}, {len(self.entries)} tensors)"

    def open_slices(self, names: Iterable[str]) -> dict[str, Any]:
        """Fetch the shards that hold the named tensors, check them, and open the tensors as slices.

        Raises CheckpointError if a shard cannot be fetched, is damaged, or differs from the hub's headers.
        """
        names = list(names)
        for shard in sorted({self.entries[name].file.name for name in names}):
            local = read_header(self._hub.fetch_whole(shard))
            for name in names:
                promised, found = self.entries[name], local.get(name)
                if promised.file.name != shard:
                    continue
                if found is None or (found.dtype, found.shape, found.nbytes) != (
                    promised.dtype,
                    promised.shape,
                    promised.nbytes,
                ):
                    raise CheckpointError(
                        f"{self.repository}: {name} in {shard} is not what the hub's header promised; try again"
                    )
        return super().open_slices(names)

    def read_slices(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the same as `open_slices`: the places of its entries are those of the hub's headers, not of local files."""
        return self.open_slices(names)

    def small_file(self, name: str) -> Path | None:
        """Fetch a small file and return its path; None if the hub does not have it."""
        return self._hub.fetch(name) if name in self._hub.files else None


def _check_name(repository: str, revision: str | None) -> None:
    """Raise CheckpointError if the texts cannot name a model on the hub."""
    if not is_hub_name(repository, revision):
        named = f"{repository}@{revision}" if revision else repository
        raise CheckpointError(
            f"{named[:200]}: neither a folder here nor a model on the hub: write it as organisation/model@revision"
        )


def read_range(
    repository: str, file: str, first: int, size: int, *, revision: str | None = None, endpoint: str | None = None
) -> bytes:
    """Return `size` bytes of a file of a model on the hub, from byte `first` on. Keeps nothing on the disk.

    Raises CheckpointError if the hub does not give exactly these bytes.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    data = bytearray()
    _check_name(repository, revision)
    with _hub_errors(repository):
        url = hf_hub_url(repository, file, revision=revision, endpoint=endpoint)
        headers = {**build_hf_headers(), "Range": f"bytes={first}-{first + size - 1}"}
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
            hf_raise_for_status(response)
            for piece in response.iter_bytes():
                data += piece
                if len(data) > size:
                    break
    if len(data) != size:
        raise CheckpointError(
            f"{repository}: the hub does not give {size} bytes of {file} from byte {first} on; try again later"
        )
    return bytes(data)


def copy_beginning(
    repository: str, file: str, size: int, folder: Path, *, revision: str | None = None, endpoint: str | None = None
) -> Path:
    """Return a copy of a file of a model on the hub, in `folder`: of its full length, but with its first `size` bytes only. The
    others are a hole, which takes no space. Raises CheckpointError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    with _hub_errors(repository, revision):
        whole = get_hf_file_metadata(hf_hub_url(repository, file, revision=revision, endpoint=endpoint)).size or 0
    path = folder / Path(file).name
    with path.open("wb") as out:
        out.write(read_range(repository, file, 0, min(size, whole), revision=revision, endpoint=endpoint))
        out.truncate(whole)
    return path


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _hub_errors(repository: str, revision: str | None = None) -> Iterator[None]:
    """Turn errors of huggingface_hub into a CheckpointError with advice for the user."""
    from huggingface_hub import errors

    transport_error: Any = errors.HfHubHTTPError.__mro__[1]  # httpx's base class, whichever httpx the library came with
    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointError(f"{repository}: its owner asks for consent: give it on the hub, then {LOGIN}") from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repository}: has no revision {revision}: it is a branch, a tag or a commit") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        message = f"neither a folder here nor a model on the hub (for a private one, {LOGIN})"
        raise CheckpointError(f"{repository}: {message}") from None
    except errors.NotASafetensorsRepoError:
        raise CheckpointError(
            f"{repository}: has no safetensors files; pickled weights "
            "are never loaded; choose a repository with safetensors"
        ) from None
    except (errors.HfHubHTTPError, errors.SafetensorsParsingError, errors.EntryNotFoundError) as error:
        raise CheckpointError(f"{repository}: the hub's answer cannot be used: {error}; try again later") from error
    except (errors.OfflineModeIsEnabled, transport_error, OSError) as error:
        raise CheckpointError(
            f"{repository}: no such folder, and the hub cannot be reached ({error}); check the name and the connection"
        ) from error


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
