"""One self-contained HTML page on a model and a prompt: measure, then draw.

>>> from tl_coupling.report import html_report, measure_prompt
>>> page = html_report({"trained": measure_prompt(trace, k=(4, 8))})
"""

from tl_coupling.report.measurements import PromptMeasurements, measure_prompt
from tl_coupling.report.page import html_report, write_report

__all__ = ["PromptMeasurements", "html_report", "measure_prompt", "write_report"]
