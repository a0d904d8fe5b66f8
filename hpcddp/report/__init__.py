"""The page of a run: one HTML file that needs no network."""

from hpcddp.report.fit import shown
from hpcddp.report.page import MARK, asset, page, script, style

__all__ = ["MARK", "asset", "page", "script", "shown", "style"]
