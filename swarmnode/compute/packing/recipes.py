"""Formats of a model's matrices for one name, as q4_k_m: those that matter more get more bits, by llama.cpp's rules.

Source: `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp. Left out: importance matrices, and the rules for Falcon and for
models of 80 layers. Tensors are known by llama.cpp's names, and by those that transformers' families use most.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarmnode.compute.packing.ggml import FORMATS, Format
from swarmnode.errors import CheckpointError, UsageError

VALUE, KEY, OUTPUT, JOINED, DOWN, END, TABLE, EXPERTS, OTHER = (
    *("value", "key", "attention output", "joined attention", "down", "end", "table", "experts", "other"),
)
"""Roles of matrices: END multiplies the last hidden states, TABLE is an embedding that does not, EXPERTS are stacked matrices"""
_PATTERNS = {
    VALUE: r"attn_v\.weight|\.(v_proj|v_lin|value)\.weight",
    KEY: r"attn_k\.weight|\.(k_proj|k_lin|key)\.weight",
    OUTPUT: r"attn_output\.weight|\.(o_proj|out_proj|out_lin)\.weight|attention\.dense\.weight",
    JOINED: r"attn_qkv\.weight|\.(qkv_proj|query_key_value|Wqkv|c_attn)\.weight",
    DOWN: r"ffn_down(_exps|_shexp)?\.weight|\.(down_proj|fc2|w2|dense_4h_to_h)(\.weight|$)",
}
MIXTRAL = 8  # experts, whose attention llama.cpp keeps in more bits
BELOW_Q5 = frozenset({"Q2_K", "Q3_K", "Q4_K", "IQ4_NL", "IQ4_XS"})
GROUPED = 4  # query heads for each key head: with as many the values' matrix is small


class MatrixPlace(NamedTuple):
    """Number of a matrix among those of its role, how many these are, and the model's query heads for each key head."""

    number: int
    of: int
    heads_per_key: float

    @property
    def is_chosen(self) -> bool:
        """Whether the matrix is in the first or last eighth, or is each third of the others."""
        eighth = self.of // 8
        return self.number < eighth or self.number >= 7 * self.of // 8 or (self.number - eighth) % 3 == 2


Rule = tuple[Callable[[MatrixPlace], bool], str]
"""Condition, and the format if it is met"""


def _always(_place: MatrixPlace) -> bool:
    return True


def _is_grouped(place: MatrixPlace) -> bool:
    return place.heads_per_key >= GROUPED


def _in_first(parts: int) -> Callable[[MatrixPlace], bool]:
    return lambda place: place.number < place.of // parts


def _below(number: int) -> Callable[[MatrixPlace], bool]:
    return lambda place: place.number < number


_CHOSEN: Callable[[MatrixPlace], bool] = lambda place: place.is_chosen  # noqa: E731


@dataclass(frozen=True)
class FormatMix:
    """Format of most matrices, GGUF's name for the whole file, and the formats of some roles; the first rule that holds counts."""

    base: str
    file_type: str
    rules: Mapping[str, Sequence[Rule]]
    table: str = ""  # format of an END; empty: Q6_K, or Q8_0 if the base is

    @property
    def end(self) -> str:
        """Format of the matrix of the last hidden states."""
        return self.table or ("Q8_0" if self.base == "Q8_0" else "Q6_K")

    def form(self, role: str, place: MatrixPlace, experts: int) -> Format:
        """Return the format of a matrix; `experts` is the number of a layer's experts, 0 without."""
        if role == END:
            return FORMATS[self.end]
        if experts == MIXTRAL and role in (VALUE, KEY):
            return FORMATS["Q8_0"]
        if experts == MIXTRAL and role == OUTPUT and self.base in BELOW_Q5:
            return FORMATS["Q5_K"]
        return FORMATS[next((form for holds, form in self.rules.get(role, ()) if holds(place)), self.base)]


def _plain(name: str) -> FormatMix:
    return FormatMix(name, name, {})


_IQ4: Mapping[str, Sequence[Rule]] = {VALUE: [(_is_grouped, "Q5_K")], DOWN: [(_in_first(8), "Q5_K")]}
RECIPES: Mapping[str, FormatMix] = {
    **{name.lower(): _plain(name) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K")},
    "q2_k": FormatMix(
        "Q2_K",
        "Q2_K",
        {VALUE: [(_is_grouped, "Q4_K"), (_always, "Q3_K")], DOWN: [(_always, "Q3_K")], OUTPUT: [(_always, "Q3_K")]},
    ),
    "q3_k_s": FormatMix("Q3_K", "Q3_K_S", {}),
    "q3_k_m": FormatMix(
        "Q3_K",
        "Q3_K_M",
        {
            VALUE: [(_below(2), "Q5_K"), (_always, "Q4_K")],
            DOWN: [(_in_first(16), "Q5_K"), (_always, "Q4_K")],
            OUTPUT: [(_always, "Q4_K")],
            JOINED: [(_always, "Q4_K")],
        },
    ),
    "q3_k_l": FormatMix(
        "Q3_K",
        "Q3_K_L",
        {role: [(_always, "Q4_K" if role == JOINED else "Q5_K")] for role in (VALUE, DOWN, OUTPUT, JOINED)},
    ),
    "q4_k_s": FormatMix("Q4_K", "Q4_K_S", {VALUE: [(_below(4), "Q5_K")], DOWN: [(_in_first(8), "Q5_K")]}),
    "q4_k_m": FormatMix(
        "Q4_K", "Q4_K_M", {VALUE: [(_CHOSEN, "Q6_K")], DOWN: [(_CHOSEN, "Q6_K")], JOINED: [(_always, "Q5_K")]}
    ),
    "q5_k_s": FormatMix("Q5_K", "Q5_K_S", {}),
    "q5_k_m": FormatMix(
        "Q5_K", "Q5_K_M", {VALUE: [(_CHOSEN, "Q6_K")], DOWN: [(_CHOSEN, "Q6_K")], JOINED: [(_always, "Q6_K")]}
    ),
    "iq4_nl": FormatMix("IQ4_NL", "IQ4_NL", _IQ4),
    "iq4_xs": FormatMix("IQ4_XS", "IQ4_XS", _IQ4),
    "mxfp4": FormatMix("Q8_0", "MXFP4_MOE", {EXPERTS: [(_always, "MXFP4")]}, table="Q8_0"),
}
ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
NARROWER = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Formats with blocks of 32 for rows that have no whole blocks of 256"""


def recipe_of(name: str) -> FormatMix:
    """Return the recipe of a name as users type it. Raises UsageError if there is none."""
    known = name.lower().replace("-", "_")
    known = ALIASES.get(known, known)
    if known in RECIPES:
        return RECIPES[known]
    near = difflib.get_close_matches(known, [*RECIPES, *ALIASES], 1)
    advice = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(RECIPES)}"
    raise UsageError(f"there is no format {name[:40]!r} to write; {advice}")


@dataclass(frozen=True)
class Matrix:
    """Matrix to be packed: its name, its shape (or that of stacked ones), and whether it is an END or a TABLE."""

    name: str
    shape: tuple[int, ...]
    end: str = ""

    @property
    def role(self) -> str:
        """Purpose of the matrix in the model."""
        if self.end:
            return self.end
        return next((role for role, pattern in _PATTERNS.items() if re.search(pattern, self.name)), OTHER)

    @property
    def layer(self) -> int:
        """First number in the name; 0 without one."""
        numbered = re.search(r"\d+", self.name)
        return int(numbered[0]) if numbered else 0


@dataclass(frozen=True)
class FormatChoice:
    """Formats of a model's matrices by name, and a sentence about those that are not in the format of the recipe."""

    forms: Mapping[str, Format]
    notices: tuple[str, ...]


def choose(
    recipe: FormatMix, matrices: Iterable[Matrix], *, heads_per_key: float = 1.0, experts: int = 0
) -> FormatChoice:
    """Return the format of each matrix. Rows without whole blocks of a format take a narrower one, or F16.

    Raises CheckpointError if there are no matrices, or none can be packed.
    """
    matrices = list(matrices)
    layers = {
        role: sorted({each.layer for each in matrices if each.role == role}) for role in {m.role for m in matrices}
    }
    stacked = any(len(each.shape) > 2 for each in matrices)
    forms: dict[str, Format] = {}
    narrowed: dict[tuple[str, str, int], int] = {}
    for each in matrices:
        role = each.role
        place = MatrixPlace(layers[role].index(each.layer), len(layers[role]), heads_per_key)
        is_expert = len(each.shape) > 2 or (not stacked and not each.end)
        wanted = recipe.form(EXPERTS if is_expert and EXPERTS in recipe.rules else role, place, experts)
        forms[each.name] = form = _whole(wanted, each.shape[-1])
        if form != wanted:
            key = wanted.name, form.name, each.shape[-1]
            narrowed[key] = narrowed.get(key, 0) + 1
    if all(form.block == 1 for form in forms.values()):
        raise CheckpointError(
            "no matrix of the model has rows of whole blocks of 32, so none can be packed: found a swarm on it as it is"
        )
    notices = [
        f"{count} matrices have rows of {inputs}, no whole blocks of {FORMATS[wanted].block}: {form} instead of {wanted}"
        for (wanted, form, inputs), count in narrowed.items()
    ]
    return FormatChoice(forms, tuple(notices))


def _whole(form: Format, inputs: int) -> Format:
    """Return the format, or the one to take instead for rows of this length."""
    if inputs % form.block:
        form = FORMATS[NARROWER.get(form.name, "F16")]
    return FORMATS["F16"] if inputs % form.block else form
