"""A page as tests read it."""

from html.parser import HTMLParser

VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})


class ReadPage(HTMLParser):
    """Checks that elements are closed in order; keeps texts, attributes, and what a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.loaded, self.texts = [], [], [], {}
        self.attributes: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        self.loaded += [
            value for name, value in attrs if name in ("src", "href", "srcset", "xlink:href", "action")
        ]
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def of(self, tag: str) -> list[dict]:
        """Attributes of every element of this kind."""
        return [attributes for name, attributes in self.attributes if name == tag]
