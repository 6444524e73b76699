"""Write what the site is built from to build/pages: the pages of docs/, and pages of what else the repository has.

`make docs` runs this first. README.md is the start page; each example is a page with its output, and so is the tour.
A link to a file of the repository leads to its page there, a name in a column of names to the reference if that has it,
and a formula in TeX is MathML.
"""

import ast
import json
from pathlib import Path
import posixpath
import re
import shutil

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build/pages"
# By its name in the repository, each source that has a page, and that page.
PAGES = {
    **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md")},
    **{f"docs/{path.name}": path.name for path in ROOT.glob("docs/*.*") if path.suffix in (".css", ".md", ".svg")},
    **{"README.md": "index.md", "docs/index.md": "pages.md", "docs/tour.ipynb": "tour.md"},
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted(ROOT.glob("examples/*.*"))},
}
REFERENCE = re.findall(r"^::: pce_mpi\.(\S+)$", (ROOT / "docs/reference.md").read_text("utf-8"), re.MULTILINE)
# What stands before a name in a column of names, which is the first of its table.
NAMES = re.compile(r"\| (`[^`]*`, )*")
TOKEN = re.compile(
    r"^```math\n(?P<block>.*?)^```$|(?P<code>^ *```.*?^ *```$|`[^`]+`)|\$(?P<inline>[^$\n]+)\$|\]\((?P<link>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def page_of(text: str, source: str) -> str:
    """Return the Markdown of a file of the repository as that of its page."""
    from latex2mathml.converter import convert  # which the tests, that read PAGES, do not install

    here = posixpath.dirname(PAGES[source])

    def link_to(path: str) -> str:
        return posixpath.relpath(PAGES[path], here)

    def replaced(found: re.Match[str]) -> str:
        if found["block"]:
            return f'<div class="formula">{convert(found["block"], display="block")}</div>'
        if found["inline"]:
            return f"<span>{convert(found['inline'])}</span>"
        if found["link"]:
            target, mark, anchor = found["link"].partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
            return f"]({link_to(path)}{mark}{anchor})" if path in PAGES else found[0]
        code = found["code"].strip("`")
        name = code.partition("(")[0]
        if text[found.start() - 1] != "[" and code in PAGES:
            return f"[{found['code']}]({link_to(code)})"
        if name in REFERENCE and NAMES.fullmatch(text[text.rfind("\n", 0, found.start()) + 1 : found.start()]):
            return f"[{found['code']}]({link_to('docs/reference.md')}#pce_mpi.{name})"
        return found["code"]

    return TOKEN.sub(replaced, text)


def parts_of(path: Path) -> tuple[str, str]:
    """Return what stands at the beginning of a program about it, and the program without that."""
    source = path.read_text("utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(source)) or "", source.split('"""', 2)[2].lstrip()
    about = re.match(r"(?://.*\n)*", source)[0]
    return re.sub("^// ?", "", about, flags=re.MULTILINE), source.removeprefix(about)


def page_of_example(path: Path) -> str:
    """Return the page of a program: what it says about itself, what it prints, and its source."""
    about, source = parts_of(path)
    title, _, about = about.partition("\n")
    kept = ROOT / f"docs/outputs/{path.stem}.txt"
    output = f"\n## What it prints\n\n```console\n{kept.read_text('utf-8')}```\n" if kept.exists() else ""
    language = path.suffix.removeprefix(".")
    page = f"# {title.rstrip('.')}\n{about}\n{output}\n## {path.name}\n\n```{language}\n{source}```\n"
    return page_of(page, f"examples/{path.name}")


def page_of_notebook(path: Path) -> str:
    """Return a notebook as it stands, with the outputs that are kept in it."""
    page = ""
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        page += page_of(source, f"docs/{path.name}") if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            if "text" in output:
                page += "\n\n```text\n" + "".join(output["text"]).rstrip() + "\n```"
            else:
                page += '\n\n<div class="output">' + "".join(output["data"]["text/html"]) + "</div>"
        page += "\n\n"
    title, rest = page.split("\n", 1)
    return f"{title}\n\n[This page as a notebook]({path.name})\n{rest}"


def main() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    (TARGET / "examples").mkdir(parents=True)
    for source, target in PAGES.items():
        path = ROOT / source
        if source.startswith("examples/"):
            text = page_of_example(path)
        elif path.suffix == ".ipynb":
            text = page_of_notebook(path)
            shutil.copy(path, TARGET)
        else:
            text = page_of(path.read_text("utf-8"), source) if path.suffix == ".md" else path.read_text("utf-8")
        (TARGET / target).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
