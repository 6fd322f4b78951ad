"""What the long tier asks of its marks, and which warnings fail no test there."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a mark that does not say why its test is in the long tier.

    Those tests go through all architectures, of which some get a remark. Remarks are
    looked at in the fast tier: here a `UserWarning` fails no test.
    """
    for item in items:
        if item.get_closest_marker("long") is not None:
            # Before those of the test itself, which may be errors.
            remarks = pytest.mark.filterwarnings("default::UserWarning")
            item.add_marker(remarks, append=False)
        for mark in item.iter_markers("long"):
            if not (mark.args or mark.kwargs.get("reason")):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked `long` without a reason: "
                    'write `@pytest.mark.long("what takes long")`'
                )
