"""The page of a run: one HTML file that needs no network.

It imports ``observe`` and the rooms below.
The commands and ``dashboard`` use ``page`` and ``asset``.
"""

from hpcddp.report.downsample import shown
from hpcddp.report.page import MARK, asset, page, script, style

__all__ = ["MARK", "asset", "page", "script", "shown", "style"]
