"""Timelines as pictures: in the terminal, as PNG or SVG, as a Chrome trace.

Each function takes timelines by label and draws them one under another on one time scale, so that
measured stands beside predicted. A plan is drawn as its simulated timeline.
"""

from pykern.plan.drawing.chrome_trace import save_chrome_trace
from pykern.plan.drawing.picture import save_picture
from pykern.plan.drawing.terminal import as_text

__all__ = ["as_text", "save_chrome_trace", "save_picture"]
