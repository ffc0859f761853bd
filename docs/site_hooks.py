"""mkdocs hooks for pages that are not in docs/*.md: made from other files, from `--help` and from docstrings."""

from __future__ import annotations

import html
import inspect
import re
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import stainlock as sl
from stainlock.cli.app import VERBS, stainlock

ROOT = Path(__file__).parents[1]
# Files at the top of the checkout, and the pages they become.
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

# Tags that make a browser load something from another server.
LOADED = re.compile(r"""<(?:script|img|iframe|link)[^>]*\s(?:src|href)="?(https?:[^\s">]+)""")

TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
CELL = re.compile(r"<(t[hd])([^>]*)>(.*?)</\1>", re.DOTALL)
INLINE_CODE = re.compile(r"(?<!<pre>)<code>[^<]*</code>")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
PROSE = 60  # a table with a longer cell is prose: on a phone each of its rows becomes a block


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in TOP.items():
        files.append(File.generated(config, page, content=_from_the_top((ROOT / name).read_text(encoding="utf-8"))))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for name, made in TOP.items():
        markdown = markdown.replace(f"](../{name}", f"]({made}")
    folder, _, file = page.file.src_uri.rpartition("/")
    verb = file.removesuffix(".md")
    if folder == "verbs" and verb in VERBS:
        markdown += f"\n## Options\n\n{_options(verb)}"
    return markdown


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark tables of prose for small screens, and options so that no line ends inside one."""
    content = TABLE.sub(_stacked, content)
    return INLINE_CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), content)


def on_post_build(config: MkDocsConfig) -> None:
    """Readers' browsers must not ask other servers for scripts, styles, fonts or images."""
    for page in Path(config.site_dir).rglob("*.html"):
        if found := LOADED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page} loads {found[1]}: expected nothing from other servers")


def _from_the_top(markdown: str) -> str:
    """The text with links adjusted to docs/, where the page will be."""
    for name, page in TOP.items():
        markdown = markdown.replace(f"]({name}", f"]({page}")
    return markdown.replace("](docs/", "](")


def _stacked(table: re.Match[str]) -> str:
    """A table of prose with the heading beside each cell, which site.css shows where columns would be too narrow."""
    if max(len(_words(cell)) for _, _, cell in CELL.findall(table[1])) <= PROSE:
        return table[0]
    headings = [html.escape(_words(cell)) for _, _, cell in CELL.findall(ROW.findall(table[1])[0])]

    def labelled(row: re.Match[str]) -> str:
        labels = iter(headings)
        return CELL.sub(lambda cell: f'<{cell[1]}{cell[2]} data-label="{next(labels)}">{cell[3]}</{cell[1]}>', row[0])

    return f"<table data-stacked>{ROW.sub(labelled, table[1])}</table>"


def _words(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", cell)).strip()


def _options(verb: str) -> str:
    command = stainlock.get_command(click.Context(stainlock), verb)
    assert command is not None
    if isinstance(command, click.Group):
        return "\n".join(f"### {name}\n\n{_listed(part, f'{verb} {name}')}" for name, part in command.commands.items())
    return _listed(command, verb)


def _listed(command: click.Command, verb: str) -> str:
    context = click.Context(command, info_name=f"stainlock {verb}", max_content_width=1000, terminal_width=1000)
    rows = [
        record
        for parameter in command.params
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context))
    ]
    usage = " ".join(command.get_usage(context).split())
    listed = [f"`{_line(names)}`\n:   {_escaped(_line(text))}\n" for names, text in rows]
    return "\n".join([f"`{usage.removeprefix('Usage: ')}`", "", *listed])


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _escaped(text: str) -> str:
    """Escape square brackets, which are not links here."""
    return re.sub(r"([\[\]])", r"\\\1", text)


def _reference() -> str:
    """A page of all public names, grouped into functions, classes and errors, with their docstrings."""
    things = {name: getattr(sl, name) for name in sorted(sl.__all__, key=str.lower)}
    errors = {name for name, thing in things.items() if inspect.isclass(thing) and issubclass(thing, Exception)}
    classes = {name for name, thing in things.items() if inspect.isclass(thing)} - errors
    sections = {
        "Functions": [name for name in things if name not in classes | errors],
        "Classes": [name for name in things if name in classes],
        "Errors": [name for name in things if name in errors],
    }
    session = "::: stainlock\n    options: { members: false, show_root_heading: false, show_root_toc_entry: false }\n"
    page = f"# Python reference\n\n{session}"
    for title, names in sections.items():
        page += f"\n## {title}\n"
        for name in names:
            page += f"\n::: {things[name].__module__}.{name}\n"
    return page
