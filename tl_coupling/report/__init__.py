"""One self-contained HTML page on a model and a prompt: results in, a page out."""

from tl_coupling.report.page import html_report, write_report

__all__ = ["html_report", "write_report"]
__dir__ = __all__.copy
