"""The audit as one page: verdict, figures, tables and evidence. It needs no network, and nothing in it can run.

Every text passes through one gate before it reaches the page: harmful characters are made visible, then it is escaped
for HTML. Only the style and the SVG that `drawing` made pass as they are.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any, TextIO

from kvaudit import __version__

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


def render(audit: Audit, out: TextIO) -> None:
    """Write the page to `out`: the same bytes for the same audit."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from kvaudit.reports.html.page import facts, sections
    from kvaudit.reports.words.findings import details_beside_line, finding_line
    from kvaudit.reports.words.gates import gate_sentence
    from kvaudit.reports.words.verdict import gates_source, verdict_line

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    folder = files(__name__)
    page = environment.from_string(folder.joinpath("page.html.j2").read_text("utf-8"))
    stream = page.stream(
        verdict=audit.verdict,
        verdict_line=verdict_line(audit.verdict),
        gates=[(gate.outcome, gate_sentence(gate)) for gate in audit.verdict.gates],
        gates_source=gates_source(audit),
        findings=[(f.seen, finding_line(f, audit.figures), details_beside_line(f)) for f in audit.findings],
        facts=facts(audit),
        sections=[section for section in sections(audit) if not section.empty],
        style=Markup(folder.joinpath("style.css").read_text("utf-8")),
        version=__version__,
    )
    out.writelines(stream)


def _harmless(value: Any) -> Any:
    """What every expression of the template passes through before it is escaped."""
    from markupsafe import Markup

    from kvaudit.reports.escape import visible

    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
