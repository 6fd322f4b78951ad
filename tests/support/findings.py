"""The pages of findings, as one text."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def findings() -> str:
    """Return the text of the page of findings and of the pages that its cards open."""
    pages = [DOCS / "findings.md", *sorted((DOCS / "findings").glob("*.md"))]
    return "\n".join(page.read_text("utf-8") for page in pages)
