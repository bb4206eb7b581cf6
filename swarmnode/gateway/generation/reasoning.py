"""What a model thinks before it answers: `<think>…</think>` at the beginning, as most chat templates have it (Qwen, DeepSeek)."""

from __future__ import annotations

from swarmnode.gateway.generation.stop_strings import StopStrings

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Parts a text as it comes into reasoning and answer. `begun` where the prompt has opened the reasoning already."""

    def __init__(self, *, begun: bool) -> None:
        self._inside = begun
        self._end = StopStrings([END])
        self._start = ""  # while it may still become BEGIN
        self._undecided = not begun
        self._told = False  # something of the part that we are in, so that white space no longer leads it

    def __repr__(self) -> str:
        return f"<ReasoningParser {'inside' if self._inside else 'outside'}>"

    @property
    def inside(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._inside

    def push(self, text: str) -> tuple[str, str]:
        """What is certain to be reasoning, and what is certain to be of the answer."""
        if self._undecided:
            self._start += text
            seen = self._start.lstrip()
            if len(seen) < len(BEGIN) and BEGIN.startswith(seen):
                return "", ""
            self._undecided, self._inside = False, seen.startswith(BEGIN)
            text = seen[len(BEGIN) :] if self._inside else self._start
        if not self._inside:
            return "", self._led(text) if self._end.found else text
        reasoning = self._led(self._end.push(text))
        if self._end.found is None:
            return reasoning, ""
        self._inside = self._told = False
        return reasoning, self._led(self._end.rest)

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        if self._undecided:
            return "", self._start
        return self._end.flush(), ""

    def _led(self, text: str) -> str:
        """Without the line breaks that templates put around both parts."""
        text = text if self._told else text.lstrip("\n")
        self._told = self._told or bool(text)
        return text
