"""The documentation site: sphinx builds it from the pages where they lie (make docs).

The root of the repository is the folder of sources. So a link between two pages, or from a page to
a source file, leads to the same file on the site as in a checkout.
"""

import re
from typing import Any

from sphinx.application import Sphinx

import pykern

project = "pykern"
release = pykern.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**.md",
    "docs/tour.ipynb",
    "bench/README.md",
    "schedules/README.md",
]
exclude_patterns = [".*", "build", "dist"]

html_theme = "furo"
html_title = f"pykern {release}"
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
# The page at the root of the site: it leads to docs/index.html.
html_extra_path = ["site"]

highlight_language = "text"
# Headings have the names that links give them on GitHub.
myst_heading_anchors = 4
# The notebook runs when the site is built: its outputs are those of this version.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

autodoc_default_options = {"members": True, "member-order": "bysource"}
# Classes of the extension have their signatures in the docstrings of their `__init__`.
autoclass_content = "both"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
# A name in backticks becomes a link where it names something public, and stays code elsewhere.
default_role = "py:obj"
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:class", r"(torch|nn|collections|contextlib|os|rich|typing)\..*"),
    # Aliases of types, which the arguments explain.
    ("py:class", r"\w+"),
]
# Public signatures have these in them, and users have nothing to do with them.
nitpick_ignore = {
    ("py:class", f"pykern.{name}")
    for name in (
        "budget.level_costs.StageCosts",
        "checkpoint.optimizer_state.OptimizerState",
        "interop.pipelining.pipe.PipeInfo",
        "interop.pipelining.ranks.Brought",
        "interop.pipelining.recorded.RecordedStage",
        "kernels.head_loss.WithGradients",
        "partition.bottleneck.Limit",
        "profiling.tables.Sheet",
        "runtime.in_order.InOrder",
        "runtime.stage.stage.Stage",
        "tuning.asked.Asked",
        "tuning.measurements.Measurements",
    )
}


def plain_signature(*event: Any) -> tuple[str | None, str | None]:
    """The signature of an object of the extension as one of Python would be."""
    signature, result = (each and plain_types(each) for each in event[-2:])
    return signature and re.sub(r"^\(self: [\w.]+(, )?", "(", signature), result


def plain_types(types: str) -> str:
    """Types that pybind11 has spelled, as a person spells them."""
    types = types.replace("typing.SupportsInt | typing.SupportsIndex", "int")
    types = types.replace("typing.SupportsFloat | typing.SupportsIndex", "float")
    return types.replace("collections.abc.", "")


def as_markup(*event: Any) -> None:
    """Makes links of the pages that a docstring names, and literal blocks of indented ones."""
    lines = event[-1]
    text = re.sub(r"docs/([\w-]+)\.md", r":doc:`/docs/\1`", "\n".join(lines))
    lines[:] = re.sub(r"(?m)^( *)(.*[^:]):\n\n(?=\1 )", r"\1\2::\n\n", text).split("\n")


def skip_fields(*event: Any) -> bool | None:
    """Leaves out the fields of named tuples, which the docstrings of their classes explain."""
    return type(event[3]).__name__ == "_tuplegetter" or None


def setup(app: Sphinx) -> None:
    """Connects the functions above with autodoc."""
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-process-docstring", as_markup)
    app.connect("autodoc-skip-member", skip_fields)
