"""Reads a page as a browser would: whether every element closes, and what there is."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "rect", "line", "polyline", "path", "circle", "br"}


class ParsedPage(HTMLParser):
    """`seen`: all elements with their attributes; `words`: what stands between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == [], "every element that opens closes"
        assert not re.search(r"<script|https?://|src=|@import|url\(", page), "it needs nothing else"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of each element of a kind."""
        return [attributes for name, attributes in self.seen if name == tag]
