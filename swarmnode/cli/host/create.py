"""Commands `swarmnode create` and `quantize`: found a swarm, and round a model's weights."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swarmnode.cli.options.founding import ADAPTERS, BootstrapOptions, MembershipOptions, NewOwnerOptions, owner_of
from swarmnode.cli.options.swarm import name_swarm
from swarmnode.config import EQUAL
from swarmnode.errors import UsageError
from swarmnode.terminal.console import HOME, JSON, command, print_json, say
from swarmnode.terminal.option import argument, of_same_names, option, path_option
from swarmnode.terminal.progress import bytes_bar

if TYPE_CHECKING:
    from swarmnode.founding.model_source import ModelSource
    from swarmnode.founding.swarm_creation import Bootstraps, NewOwner
    from swarmnode.swarm.storage.swarmfile import Swarm


MODES = ("serve", "train")
TASKS = ("auto", "generate", "embed", "classify")
PRIORITIES = ("none", "credit")
PRODUCTS = ("any", "fast", "exact")
SAMPLE_BYTES = 1 << 17  # of a text whose hidden states choose a bottleneck's projections
DOORS = {"embed": "v1/embeddings", "classify": "classify"}


@dataclass(frozen=True)
class NewModelOptions:
    """Options of a new swarm's model and mode."""

    mode: str = option("serve", "What the swarm does with the model.", choices=MODES)
    model: str = option(
        "",
        "Checkpoint: a folder with config.json and safetensors, a GGUF file, or a hub id (organisation/model, "
        "organisation/model@revision, and for GGUF files organisation/model:Q4_K_M). A GGUF file's weights stay packed, other "
        "quantised ones are dequantised.",
        metavar="PATH|HUB_ID",
    )
    config: Path | None = path_option(
        "Train from random weights: a folder with a config.json of transformers and, if any, a tokenizer: those of a model's page "
        "on the hub, or what GPT2Config(...).save_pretrained(DIR) writes.",
        metavar="DIR",
    )
    module: str = option(
        "",
        "Torch module: a function that returns it with an example batch, or an exported program.",
        metavar="PACKAGE.MODULE:FUNCTION|FILE.pt2",
    )
    task: str = option("auto", "What --model does for clients; auto: as its config says.", choices=TASKS)
    seed: int = option(0, "Seed of the random weights of --config.", min=0, max=2**63 - 1)
    plain: bool = option(False, "Write the weights of a GGUF file dequantised, for older machines.")
    products: str = option(
        "any",
        "Least precise products of packed weights that nodes may use; fast: no second rounding of the weights (--quantize), exact: "
        "float32 throughout, for the same text after a failover.",
        choices=PRODUCTS,
    )
    equal_bits: bool = option(
        False,
        "Nodes must compute each position with the same bits in any company, so that audits find one wrong bit: for plain "
        "weights on CPUs (run --equal-bits).",
    )
    byte_level: bool = option(False, "Use bytes as tokens, without a tokenizer.")
    units: int = option(0, "Cut a --module into about this many layers.", show_default=False)
    bottleneck: int | None = option(
        None,
        "Only this many numbers of a token cross between two stages, by learned projections, so that slow lines can train. It "
        "stays a part of the model.",
        typed=int,
        metavar="R",
    )
    stage_layers: int | None = option(
        None, "With --bottleneck: layers of the smallest stage; default: a fifth of all.", typed=int, metavar="K"
    )
    anchor: int | None = option(
        None,
        "With --bottleneck: size of the learned vector of each token that the stage behind a boundary adds, at most the hidden "
        "size, which is the default. 0: none; then the first and the last stage alone see the text, and the loss is higher.",
        typed=int,
        metavar="A",
    )
    sample: Path | None = path_option(
        "With --bottleneck and --model: a text like the data, from which the projections begin."
    )
    adapters: dict[str, Path] = ADAPTERS

    def check(self) -> None:
        """Check that the options go together. Raises UsageError if they do not."""
        if sum(map(bool, (self.model, self.config, self.module))) != 1:
            raise UsageError("give exactly one of --model, --config and --module")
        if self.mode == "serve" and self.config:
            raise UsageError(
                "a swarm that serves needs trained weights (--model, --module); --config needs --mode train"
            )
        if self.task != "auto" and not self.serves_checkpoint:
            raise UsageError("--task needs --model and --mode serve")
        if self.units and not self.module:
            raise UsageError("--units needs --module; a language model is always cut into its layers")
        if self.equal_bits and not (self.serves_checkpoint and self.products == "any"):
            raise UsageError("--equal-bits needs --model and --mode serve, and no --products")
        if self.plain and not self.serves_checkpoint:
            raise UsageError("--plain needs --model and --mode serve")
        if self.byte_level and (self.module or self.mode == "serve"):
            raise UsageError("--byte-level needs a language model and --mode train")
        if self.bottleneck is None and (self.stage_layers is not None or self.sample or self.anchor is not None):
            raise UsageError("--stage-layers, --anchor and --sample need --bottleneck")
        if self.bottleneck is not None and (self.module or self.mode == "serve"):
            raise UsageError("--bottleneck needs a language model (--config or --model) and --mode train")
        if (self.bottleneck is not None and bool(self.model)) != bool(self.sample):
            raise UsageError("--sample FILE goes with --bottleneck and --model: a text like the data")
        if self.adapters and not self.serves_checkpoint:
            raise UsageError("--adapter needs --model and --mode serve")

    @property
    def asked_products(self) -> str:
        """The products that the manifest asks for; empty for any."""
        return EQUAL if self.equal_bits else "" if self.products == "any" else self.products

    @property
    def what(self) -> str:
        """The text that names the model: that of --model or --config, or the last part of --module."""
        return self.model or str(self.config or "") or self.module.rpartition(":")[2].removesuffix(".pt2")

    def founded(self, swarm: Swarm) -> bool:
        """Return whether `swarm` was founded by these --config or --module: the sizes in the config are the same, or the swarm has
        a module. False for --model, and if the swarm's weights are not here."""
        from swarmnode.client.tokenizer import read_config
        from swarmnode.swarm.storage.content import CONFIG_NAME, GRAPH_NAME

        folder = swarm.checkpoint
        if folder is None or self.model:
            return False
        if self.config is None:
            return (folder / GRAPH_NAME).is_file()
        given = self.config if self.config.name == CONFIG_NAME else self.config / CONFIG_NAME
        asked, kept = read_config(given.expanduser()), read_config(folder / CONFIG_NAME)
        sizes = {name: size for name, size in asked.items() if type(size) is int and name in kept}
        return bool(sizes) and all(kept[name] == size for name, size in sizes.items())

    @property
    def serves_checkpoint(self) -> bool:
        """Whether the swarm serves a checkpoint that already exists."""
        return self.mode == "serve" and bool(self.model)

    def found(
        self,
        path: Path,
        bootstraps: Bootstraps,
        owner: NewOwner | None,
        *,
        private: bool,
        by_credit: bool = False,
        force: bool = False,
        quiet: bool,
    ) -> tuple[Swarm, ModelSource]:
        """Found the swarm of the file `path` and write its files; return it and its model. Raises UsageError, CheckpointError,
        LocalError."""
        from swarmnode.founding.swarm_creation import create_and_save, new_beside

        with new_beside(path) as weights:
            source = self.source(weights, force=force, quiet=quiet)
            with bytes_bar("Hashing the weights", quiet=quiet) as progress:
                swarm = create_and_save(
                    path,
                    source,
                    bootstraps,
                    owner,
                    mode=self.mode,
                    private=private,
                    products=self.asked_products,
                    by_credit=by_credit,
                    adapters=self.adapters,
                    force=force,
                    progress=progress,
                )
        return swarm, source

    def source(self, weights: Path, *, force: bool, quiet: bool) -> ModelSource:
        """Return the model. Weights that do not exist yet are written into the folder `weights`."""
        from swarmnode.founding.model_source import (
            from_checkpoint,
            from_config,
            from_model,
            from_module,
            with_bottleneck,
        )

        trains = self.mode == "train"
        if self.config is not None:
            return from_config(
                self.config,
                weights,
                seed=self.seed,
                byte_level=self.byte_level,
                bottleneck=self.bottleneck,
                stage_layers=self.stage_layers,
                anchor=self.anchor,
                force=force,
            )
        if self.module:
            return from_module(self.module, weights, units=self.units or None, trains=trains, force=force)
        with bytes_bar("Reading the weights", quiet=quiet) as progress:
            if self.bottleneck is not None:
                return with_bottleneck(
                    self.model,
                    weights,
                    self.bottleneck,
                    self._sample_ids,
                    stage_layers=self.stage_layers,
                    anchor=self.anchor,
                    byte_level=self.byte_level,
                    force=force,
                )
            if trains:
                return from_checkpoint(self.model, weights, byte_level=self.byte_level, force=force, progress=progress)
            task = None if self.task == "auto" else self.task
            return from_model(self.model, weights, task=task, packs=not self.plain, force=force, progress=progress)

    def _sample_ids(self, folder: Path) -> list[int]:
        """Return the tokens of `sample`, by the tokenizer in a model's folder; without one, its bytes. Raises UsageError."""
        from swarmnode.client.tokenizer import Tokenizer
        from swarmnode.swarm.storage.content import has_tokenizer

        assert self.sample is not None
        try:
            text = self.sample.read_bytes()[:SAMPLE_BYTES]
        except OSError as error:
            raise UsageError(f"--sample {self.sample}: cannot be read: {error.strerror or error}") from None
        if self.byte_level or not has_tokenizer(file.name for file in folder.iterdir()):
            return list(text)
        return Tokenizer(folder).encode(text.decode(errors="replace"))


@dataclass(frozen=True)
class CreateBootstrapOptions(BootstrapOptions):
    """Addresses of a new bootstrap peer, or of running ones, by the names of the fields of Bootstraps."""

    running: list[str] = option(
        [], "Use this running bootstrap peer (multiaddr with /p2p/). Repeatable.", "--bootstrap", metavar="MADDR"
    )


@dataclass(frozen=True)
class StandingOptions(MembershipOptions):
    """Options of membership and priority."""

    priority: str = option(
        "none", "Whose sessions go first; credit: those of machines that served others.", choices=PRIORITIES
    )


@command
def create(
    *,
    name: str = argument(..., "Name of the swarm; its file is NAME.swarm.", metavar="NAME"),
    model: NewModelOptions,
    doors: Annotated[CreateBootstrapOptions, "running listen announce"],
    standing: StandingOptions,
    owner: NewOwnerOptions,
    home: Path = HOME,
    force: bool = option(False, "Overwrite existing files NAME.swarm and NAME-weights."),
    quiet: bool = option(False, "Print only the invite, which a private swarm has none of.", "--quiet", "-q"),
    as_json: bool = JSON,
) -> None:
    """Found a swarm that serves or trains a model.

    It writes NAME.swarm, for you alone, and NAME.owner, your key to invite and revoke. New weights (of --config, --module or a
    quantised model) go to NAME-weights, adapters to NAME-adapters.

    Example: swarmnode create friends --model ./llama --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/203.0.113.7/tcp/4001

    Example: swarmnode create school --mode train --config ./gpt2-small --listen /ip4/0.0.0.0/tcp/4001

    Example: swarmnode create poets --model ./llama --adapter verse=./verse-lora --adapter prose=./prose-lora

    Example: swarmnode create club --public --model ./llama --listen /ip4/0.0.0.0/tcp/4001
    """
    membership, silent = standing.membership, quiet or as_json
    model.check()
    from swarmnode.founding.swarm_creation import Bootstraps, new_swarm_file

    path = new_swarm_file(name, force=force)
    bootstraps = of_same_names(Bootstraps, doors).settled()
    new = None if membership == "open" else owner_of(path, owner, force=force)
    by_credit = standing.priority == "credit"
    private = membership == "private"
    swarm, source = model.found(path, bootstraps, new, private=private, by_credit=by_credit, force=force, quiet=silent)
    name_swarm(path, home)
    if as_json:
        _print_json(swarm, path, source)
    elif quiet:
        say("" if swarm.private else swarm.invite, nl=not swarm.private)
    else:
        _tell(swarm, path, source, model.mode)
        if new is not None:
            say(new.advice)


def _tell(swarm: Swarm, path: Path, model_source: ModelSource, mode: str) -> None:
    """Print the written files, the ones to keep, and the next steps."""
    for remark in model_source.remarks:
        say(f"Note: {remark}")
    file = shlex.quote(str(path))
    say(
        f"Wrote {path}. Next: swarmnode host --door-only {file}, then on each machine: swarmnode join, and paste the invite"
    )
    if mode == "train":
        say(f"When they run: swarmnode train {file} --data PATH --steps N")
    elif model_source.model.task:
        say(f"When they run: swarmnode serve {file}, and call /{DOORS[model_source.model.task]}")
    elif model_source.kind == "graph":
        say(f"When they run: swarmnode infer {file} --input FILE.npz")
    say(_reach(swarm))
    if swarm.private:
        say(f"An invite for a friend: swarmnode invite {file}")
    else:
        say(f"Invite:\n{swarm.invite}")


def _reach(swarm: Swarm) -> str:
    """Return the sentence that tells from where the invite leads to the swarm."""
    from swarmnode.net.addressing.addresses import is_public, without_peer

    if not swarm.reaches_others:
        return (
            "This invite works only on this machine. To let others in, create the swarm with --listen and --announce."
        )
    addresses = ", ".join(map(without_peer, swarm.bootstraps))
    if any(map(is_public, swarm.bootstraps)):
        return f"The invite leads to {addresses}."
    return f"The invite leads to {addresses}, for this network only. For the internet, add --announce ADDRESS."


def _print_json(swarm: Swarm, path: Path, model_source: ModelSource) -> None:
    assert swarm.manifest is not None
    print_json(
        {
            "swarm": swarm.id.hex(),
            "name": swarm.name,
            "file": str(path),
            "membership": swarm.manifest.membership,
            "priority": swarm.manifest.priority or None,
            "products": swarm.manifest.products or None,
            "bottleneck": swarm.manifest.bottleneck or None,
            "anchor": swarm.manifest.anchor or None,
            "owner": swarm.owner.hex(),
            "invite": None if swarm.private else swarm.invite,
            "kind": model_source.kind,
            "mode": swarm.manifest.mode,
            "units": model_source.model.units,
            "bytes": swarm.manifest.total_bytes,
            "weights": str(model_source.folder),
            "adapters": list(swarm.manifest.adapter_names),
            "remarks": list(model_source.remarks),
        }
    )


@command
def quantize(
    *,
    model: str = argument(..., "GGUF file, or a folder or hub id of a checkpoint in safetensors.", metavar="IN"),
    out: Path = argument(
        ...,
        "What to write: a GGUF file if IN is one, else a folder for `create` and `host`.",
        typed=Path,
        metavar="OUT",
    ),
    form: str = option(
        "q4_k_m",
        "Number format: q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k_s|m|l, q4_k_s|m, q5_k_s|m, q6_k, iq4_nl, iq4_xs, or mxfp4 "
        "(experts; the rest q8_0).",
        "--format",
        metavar="NAME",
    ),
    allow_requantize: bool = option(False, "Round weights that are packed already a second time."),
    force: bool = option(False, "Replace OUT."),
    as_json: bool = JSON,
) -> None:
    """Write a model with packed weights, of 3 to 8 bits each.

    Matrices that matter more get more bits, as in llama.cpp; norms stay float32. OUT appears when it is complete.

    Example: swarmnode quantize ./Qwen3-8B-F16.gguf ./Qwen3-8B-Q4_K_M.gguf

    Example: swarmnode quantize Qwen/Qwen3-8B ./qwen3-packed --format q5_k_m
    """
    from swarmnode.counting import format_bytes
    from swarmnode.founding.quantisation import quantise_model

    with bytes_bar("Packing the weights", quiet=as_json) as progress:
        made = quantise_model(model, out, form, again=allow_requantize, force=force, progress=progress)
    if as_json:
        values = {"bytes": made.nbytes, "formats": dict(made.formats), "notices": list(made.notices)}
        print_json({"out": str(out), **values})
        return
    for notice in made.notices:
        say(f"Note: {notice}")
    formats = ", ".join(f"{count} in {name}" for name, count in made.formats.items())
    say(f"Wrote {out}, {format_bytes(made.nbytes)}; matrices: {formats}. Next: swarmnode host {shlex.quote(str(out))}")
