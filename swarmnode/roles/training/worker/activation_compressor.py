"""Activation compressor: what a stage's values travel as, link by link and direction by direction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compress.values import Encoded, describe_values, encode_values
from swarmnode.errors import UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import Choice, Controller, Look, adatopk_keep, encoded_bytes

AUTO, ADATOPK = "auto", "adatopk"
LARGEST_RATIO = 100.0  # of AdaTopK, on the slowest link
UNKNOWN = Choice(Codec.NONE, "nothing is known of the link yet")

OnChoice = Callable[[PeerId, str, Choice], None]
"""(peer, direction, choice): what goes there travels otherwise from now on"""


class ActivationCompressor:
    """One controller for each link and direction. `beat_s` is the coordinator's word on how long the slowest stage computes.

    `mode` "auto" chooses among the codecs that the swarm allows; a codec's name fixes it; "adatopk" is FusionLLM's rule.
    """

    def __init__(self, mode: str, allowed: Collection[int]) -> None:
        fixed = {ADATOPK: Codec.TOPK}.get(mode) or (None if mode == AUTO else Codec[mode.upper()])
        if fixed not in (None, Codec.NONE) and fixed not in allowed:
            raise UsageError(f"--compress {mode}: this swarm does not allow it; choose {AUTO}")
        self.beat_s = 0.0
        self.on_choice: OnChoice = lambda _peer, _direction, _choice: None
        self._mode = mode
        self._allowed = set(allowed) if fixed is None else {fixed}
        self._controllers: dict[tuple[PeerId, str], Controller] = {}
        self._choices: dict[tuple[PeerId, str], Choice] = {}
        self._link_s: dict[tuple[PeerId, str], float] = {}

    def __repr__(self) -> str:
        return f"<ActivationCompressor {self._mode}, {len(self._controllers)} links, beat {self.beat_s:.3g} s>"

    @property
    def choices(self) -> Mapping[tuple[PeerId, str], Choice]:
        """By peer and direction."""
        return self._choices.copy()  # at once: the bench adds links meanwhile

    def encode(self, values: Sequence[Tensor], peer: PeerId, direction: str, bandwidth_bps: float | None) -> Encoded:
        """Descriptors and payloads for a peer; on the bench."""
        choice = self._choose(values, (peer, direction), bandwidth_bps)
        return encode_values(values, choice.codec, choice.keep)

    def _choose(self, values: Sequence[Tensor], link: tuple[PeerId, str], bandwidth_bps: float | None) -> Choice:
        infos = describe_values(values)
        if self._mode == ADATOPK:
            before = self._choices.get(link, UNKNOWN).codec
            choice = self._by_adatopk(encoded_bytes(infos, Codec.NONE) * 8, bandwidth_bps, link)
        else:
            controller = self._controllers.setdefault(link, Controller(self._allowed))
            before = controller.choice.codec
            directions = len({direction for _, direction in self._controllers})
            choice = controller.look(Look(infos, bandwidth_bps, self.beat_s, directions))
        self._choices[link] = choice
        if choice.codec != before:
            self.on_choice(*link, choice)
        return choice

    def _by_adatopk(self, bits: int, bandwidth_bps: float | None, link: tuple[PeerId, str]) -> Choice:
        """Against the slowest link of this stage."""
        if bandwidth_bps is None:
            return UNKNOWN
        self._link_s[link] = bits / bandwidth_bps
        keep = adatopk_keep(self._link_s[link], max(self._link_s.values()), LARGEST_RATIO)
        return Choice(Codec.TOPK if keep < 1 else Codec.NONE, f"AdaTopK keeps {keep:.2g} of the elements", keep)
