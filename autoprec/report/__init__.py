"""Reports of runs, comparisons and sweeps as one page that needs no network.

``build`` reads folders and returns a :class:`Report` of plain data; ``write_html`` draws it.
"""

from autoprec.report.build import build
from autoprec.report.folders import ReportError
from autoprec.report.html_page import write_html
from autoprec.report.page_data import Report
from autoprec.report.prices import Prices

__all__ = ["Prices", "Report", "ReportError", "build", "write_html"]
