"""What the long tier asks of its marks."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a mark that does not say why its test is in the long tier."""
    for item in items:
        for mark in item.iter_markers("long"):
            if not (mark.args or mark.kwargs.get("reason")):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked `long` without a reason: "
                    'write `@pytest.mark.long("what takes long")`'
                )
