"""Write the keys of quantised checkpoints into docs/models.md, as the code has them: `python contrib/docs/quantisation.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swarmnode.compute.packing.methods import CALIBRATION, EVERYWHERE, KEYS, METHODS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- keys of quantization_config -->\n", "<!-- end -->\n"
SHARED = "the other ones of calibration (below)"


def page() -> str:
    """Return the page with the keys as the code has them."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{_section()}{END}{after}"


def _section() -> str:
    assert KEYS.keys() == METHODS.keys()
    rows = []
    for name, (read, harmless) in KEYS.items():
        calibration = [SHARED] if harmless >= CALIBRATION else []
        without_effect = [*calibration, *_names(harmless - CALIBRATION - read)]
        rows.append(f"| {name} | {_listed(read)} | {', '.join(without_effect) or '-'} |")
    return "\n".join(
        [
            "| `quant_method` | read | no effect |",
            "|---|---|---|",
            f"| every one, unless read below | {_listed({'quant_method'})} | {_listed(EVERYWHERE - {'quant_method'})} |",
            *rows,
            "",
            f"Keys of calibration: {_listed(CALIBRATION)}.",
            "",
        ]
    )


def _names(keys: Iterable[str]) -> list[str]:
    return [f"`{key}`" for key in sorted(keys)]


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(_names(keys)) or "-"


if __name__ == "__main__":
    PAGE.write_text(page())
