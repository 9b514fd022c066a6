"""The directive ``gallery``: pages of real comparisons, made when the documentation is built.

Each folder in ``docs/gallery`` holds the ``results.json`` that a command wrote. The pages are
written by the code of the same commit, so they never show an older layout.
"""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from stateline.reports import read_results, write_report
from stateline.reports.sentences import headline

FOLDER = Path(__file__).parents[1] / "gallery"


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive, and write the pages at the end of a build."""
    app.add_directive("gallery", Gallery)
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def folders() -> list[Path]:
    """The folders with results, in order of their names."""
    return sorted(path.parent for path in FOLDER.glob("*/results.json"))


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Write a page for each folder beside the page of the gallery."""
    if error is None and app.builder.format == "html":
        for folder in folders():
            write_report(read_results(folder), Path(app.outdir, "gallery", f"{folder.name}.html"))


class Gallery(SphinxDirective):
    """A list of the pages: what each compares, and the command that made it.

    Its content is for readers of the source.
    """

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return a link, a sentence and a command for each page."""
        found: list[nodes.Node] = []
        for folder in folders():
            results = read_results(folder)
            link = nodes.reference("", folder.name, refuri=f"gallery/{folder.name}.html")
            found.append(nodes.paragraph("", "", link, nodes.Text(f": {headline(results)}")))
            found.append(nodes.literal_block(results.command, results.command, language="console"))
            self.env.note_dependency(str(folder / "results.json"))
        return found
