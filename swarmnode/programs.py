"""Functions for Python programs: found a swarm, host it, and train with it. `connect` and `Node` stand beside them.

swarm = swarmnode.create("./my-checkpoint", "friends")
with swarmnode.host(swarm) as hosted:
    print(hosted.invite)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypedDict

from swarmnode.compute.training.local import StepSummary
from swarmnode.data.samples import DataRules, DataSummary
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.files import home_folder
from swarmnode.membership.owner import InviteTerms, friends_invite
from swarmnode.net.identity import hosting_alone
from swarmnode.node.bootstrap import SwarmHost
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host_config import HostConfig
from swarmnode.swarm.records.manifest import SERVE, TRAIN
from swarmnode.swarm.records.run import RECIPE, Averaging, Compression, Recipe, Run
from swarmnode.swarm.storage.owner_files import (
    OWNER_SUFFIX,
    is_locked,
    load_owner_key,
    open_issued_invites,
)
from swarmnode.swarm.storage.swarmfile import JoinedSwarms, Swarm, load_swarm

log = logging.getLogger(__name__)

GUEST = InviteTerms(uses=1, life_s=30 * 86_400.0)  # as those of `swarmnode host`

if TYPE_CHECKING:
    from typing_extensions import Unpack


def create(
    model: str | Path,
    name: str | Path,
    *,
    mode: str = SERVE,
    membership: str = "private",
    password: str = "",
    listen: Sequence[str] = (),
    announce: Sequence[str] = (),
    adapters: Mapping[str, Path] = MappingProxyType({}),
    plain: bool = False,
    overwrite: bool = False,
    home: str | Path | None = None,
) -> Swarm:
    """Found a swarm for a model and write NAME.swarm. It has no peers yet: `host` or `swarmnode host --door-only` opens its door.

    From now on `connect`, `Node`, `train` and the commands know the swarm by its name in any folder.

    Args:
        model: Folder in the format of transformers, GGUF file, or hub id.
        name: Name of the swarm, or path of its file.
        mode: "serve" or "train".
        membership: "private" admits invited machines only, "public" every machine, "open" every holder of the invite.
        password: Password of the new owner's key, NAME.owner, for private and public swarms; empty for none.
        listen: Multiaddrs at which the bootstrap peer will listen; by default a free port of loopback.
        announce: Multiaddrs at which other machines reach the bootstrap peer.
        adapters: Folders with LoRA adapters, by the adapters' names.
        plain: Whether the weights of a GGUF file are written dequantised, for older machines.
        overwrite: Whether an existing NAME.swarm may be replaced.
        home: Folder that keeps the names of swarms; by default $SWARMNODE_HOME, else the platform's place for user data.

    Returns:
        The swarm; its `file` is the path of NAME.swarm, and its `invite` the line for other machines.

    Raises:
        UsageError: If a name, an address or the membership is wrong.
        CheckpointError: If the model cannot be read or split.
        LocalError: If a file cannot be written.
    """
    from swarmnode.founding.model_source import from_checkpoint, from_model
    from swarmnode.founding.swarm_creation import Bootstraps, create_and_save, new_beside, new_owner, new_swarm_file

    if mode not in (SERVE, TRAIN):
        raise UsageError(f"mode {mode!r}: choose {SERVE!r} or {TRAIN!r}")
    if membership not in ("open", "public", "private"):
        raise UsageError(f"membership {membership!r}: choose 'open', 'public' or 'private'")
    path = new_swarm_file(str(name), force=overwrite)
    bootstraps = Bootstraps((), listen, announce).settled()
    owner = None if membership == "open" else new_owner(path, lambda: password, force=overwrite)
    with new_beside(path) as weights:
        if mode == SERVE:
            source = from_model(str(model), weights, packs=not plain, force=overwrite)
        else:
            source = from_checkpoint(str(model), weights, force=overwrite)
        private = membership == "private"
        swarm = create_and_save(
            path, source, bootstraps, owner, mode=mode, private=private, adapters=adapters, force=overwrite
        )
    _name(path, home_folder(home))
    return swarm


def _name(file: Path, home: Path) -> None:
    """Let Python and commands in any folder know a founder's swarm by the name of its file; does nothing if the name cannot be
    kept."""
    with contextlib.suppress(OSError, SwarmnodeError):  # then other folders need the path
        JoinedSwarms(home).remember_file(file)


class _Background:
    """Work in a thread with an event loop of its own; `_stop` asks it to end."""

    def __init__(self, name: str) -> None:
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    async def _work(self) -> None:
        raise NotImplementedError

    def _over(self, error: BaseException | None) -> None:
        """Take the error that ended the work, or None. Called in the thread."""
        raise NotImplementedError

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        error: BaseException | None = None
        try:
            self._loop.run_until_complete(self._work())
        except BaseException as ending:
            error = ending
        finally:
            self._loop.close()
            self._over(error)

    def _end(self) -> None:
        """Ask the work to end, and wait for it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread ends by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class HostedSwarm(_Background):
    """A swarm with an open door and a running node, in a thread of this process: `with swarmnode.host(…) as hosted`."""

    def __init__(self, swarm: Swarm, config: NodeConfig, password: str = "") -> None:
        # The key beside the .swarm file makes invites; a locked one needs its password.
        path = None if swarm.file is None else swarm.file.with_suffix(OWNER_SUFFIX)
        self._key = None
        if path is not None and path.exists() and (password or not is_locked(path)):
            self._key = load_owner_key(path, password or None)
        door = HostConfig(config.host.home, name="bootstrap")
        self._host = SwarmHost(swarm, door, config, self._tell)
        super().__init__("swarmnode-host")
        self._swarm = swarm
        self._home = config.host.home
        self._opened: queue.Queue[BaseException | None] = queue.Queue()
        self._serving = threading.Event()
        self._error: BaseException | None = None
        self._thread.start()
        if (error := self._opened.get()) is not None:
            self._thread.join()
            raise error

    def __enter__(self) -> HostedSwarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def invite(self) -> str:
        """The line for other machines. For a private swarm it admits one friend; when it is used up or has expired, another
        one is made. Raises UsageError if that needs the owner's key and the key is not here, or locked."""
        swarm = self._swarm
        if swarm.file is None:
            return swarm.invite
        book = open_issued_invites(swarm.file)
        line = friends_invite(swarm, self._key, GUEST, book, self._host.uses_of)
        if line is None:
            raise UsageError(f"a new invite to {swarm.name} needs the owner's key: give its password to `host`")
        return line

    def wait_until_serving(self, timeout_s: float | None = None) -> bool:
        """Wait until the node of this process serves. Returns whether it does, False after `timeout_s` seconds.

        Raises the error that ended the node.
        """
        serves = self._serving.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return serves

    def close(self) -> None:
        """Let sessions move away, close the door and wait for the end. Raises the error that ended the node earlier."""
        self._end()
        error, self._error = self._error, None
        if error is not None:
            raise error

    async def _work(self) -> None:
        async def opened(swarm: Swarm, _addresses: list[str]) -> None:
            self._swarm = swarm
            self._opened.put(None)

        with hosting_alone(self._home, self._swarm.id, self._swarm.name):
            await self._host.run(self._stop, opened)

    def _over(self, error: BaseException | None) -> None:
        self._error = error
        self._opened.put(error)
        self._serving.set()

    def _tell(self, event: str, _text: str, **_details: object) -> None:
        if event == "ready":
            self._serving.set()


def host(swarm: Swarm | str | Path, config: NodeConfig | None = None, *, password: str = "") -> HostedSwarm:
    """Open the door of a swarm that was founded here, and lend this machine to it.

    Args:
        swarm: The result of `create`, the .swarm file, or the name of a swarm that was founded on this machine.
        config: What the node lends; the default is most of the machine.
        password: Password of a locked owner's key, to make invites.

    Returns:
        The running host; leave its `with` block, or call `close`, to end it.

    Raises:
        UsageError: If `swarm` is only an invite, or the password is wrong.
        LocalError, NetworkDown: If the door cannot be opened, or a process hosts the swarm here already.
    """
    config = config or NodeConfig()
    known = swarm if isinstance(swarm, Swarm) else load_swarm(swarm, config.host.home)
    if known.file is None:
        raise UsageError("only the .swarm file of the founder can be hosted; with an invite, use Node")
    _name(known.file, config.host.home)
    return HostedSwarm(known, config, password)


@dataclass(frozen=True)
class TrainingWait:
    """A training that stands still: the reason `why`, and the `missing` layers without a holder."""

    why: str
    missing: tuple[int, ...] = ()


class RunKeywords(TypedDict, total=False):
    """Keyword arguments of `train`: the settings of a run beside `steps`. Defaults are those of `swarmnode train`."""

    batch: int
    microbatch: int
    sequence: int
    optimizer: str
    learning_rate: float
    schedule: str
    warmup_steps: int
    final_share: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    momentum: float
    clip: float
    seed: int
    checkpoint_steps: int
    autocast: bool
    averaging: Averaging
    compression: Compression
    recipe: Recipe


def train(
    swarm: Swarm | str | Path,
    data: str | Path,
    *,
    steps: int,
    home: str | Path | None = None,
    patience_s: float = 60.0,
    end_answers: bool = False,
    **settings: Unpack[RunKeywords],
) -> Iterator[StepSummary | TrainingWait]:
    """Train a swarm's model on `data`: iterate over the steps.

    Leaving the loop stops this trainer; the swarm keeps the finished steps, and the same call continues. At the start, fields and
    files of the data that are passed over are logged, and whether no label teaches the model to stop.

    Args:
        swarm: A swarm that trains, its .swarm file, an invite, or the name of a joined, founded or public swarm.
        data: Text file, folder or .jsonl; for a module an .npz file of its inputs.
        steps: Updates of the whole run.
        home: Folder of this machine's identity; by default $SWARMNODE_HOME, else the platform's place for user data.
        patience_s: Seconds to wait for the swarm's answer.
        end_answers: Put the stop token behind the last answer of a conversation if its template does not.
        **settings: Fields of the run, such as `batch`, `sequence`, `learning_rate` and `seed`.

    Yields:
        A StepSummary for each step, and a TrainingWait when the training begins to stand still.

    Raises:
        UsageError: If data and settings do not fit the model, or another run is under way.
        NetworkDown: If no peer answers within `patience_s`.
        NotFinite: If a loss or a gradient is NaN or infinite.
    """
    from swarmnode.client.training.preparation import NO_DATA, check_early

    recipe = settings.get("recipe") or Recipe(settings.get("schedule", "cosine"))
    fields = {"batch": 32, "microbatch": 0, **settings, "schedule": RECIPE, "recipe": recipe}
    run = Run(data=NO_DATA, steps=steps, **fields)  # type: ignore[arg-type]  # checked by RunKeywords
    path = Path(data)
    check_early(path, run)
    folder = home_folder(home)
    known = swarm if isinstance(swarm, Swarm) else load_swarm(swarm, folder)
    return _Training(known, folder, path, run, DataRules(shown=0, ends_answers=end_answers), patience_s).events()


class _Training(_Background):
    """A training in a thread of its own, whose events are read in this one."""

    def __init__(self, swarm: Swarm, home: Path, data: Path, run: Run, rules: DataRules, patience_s: float) -> None:
        super().__init__("swarmnode-train")
        self._request = (swarm, home, data, run, rules, patience_s)
        self._events: queue.Queue[StepSummary | TrainingWait | BaseException | None] = queue.Queue()

    def events(self) -> Iterator[StepSummary | TrainingWait]:
        """Yield the events until the run is over. Raises the error that ended it."""
        self._thread.start()
        try:
            while (event := self._events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self._end()

    # Listener

    def begun(self, run: Run, data: DataSummary) -> None:
        """Log what the program should know of its data."""
        for note in data.notes:
            log.warning("%s", note)

    def step(self, report: StepSummary) -> None:
        """Pass a step on."""
        self._events.put(report)

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """Pass on the reason why the training waits, and the missing units."""
        self._events.put(TrainingWait(why, missing))

    def _over(self, error: BaseException | None) -> None:
        self._events.put(error)

    async def _work(self) -> None:
        from swarmnode.client.training.client import TrainingClient

        swarm, home, data, run, rules, patience_s = self._request
        client = await TrainingClient.join(swarm, home, patience_s=patience_s)
        try:
            await client.train(data, run, self, self._stop, rules)
        finally:
            await client.close()
