"""A page of HTML as a parser reads it."""

from html.parser import HTMLParser


class Reader(HTMLParser):
    """Elements, text, and whether every element is closed in order."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self, source: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", [""]
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.open[-3:]

    def handle_data(self, data: str) -> None:
        if self.open[-1] not in ("script", "style"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]
