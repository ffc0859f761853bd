"""The documentation names only verbs, options, files and headings that exist, and its Python runs."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import click
import pytest

from stainlock.cli.app import VERBS, stainlock

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
# `make docs` makes these pages of files at the top of the checkout, and of docstrings.
GENERATED = {"index.md", "contributing.md", "changelog.md", "reference.md"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def command(verb: str) -> click.Command:
    found = stainlock.get_command(click.Context(stainlock), verb)
    assert found is not None
    return found


def parameters_of(verb: str) -> list[click.Parameter]:
    """A verb's options; for a group of verbs, those of all its verbs."""
    found = command(verb)
    parts = found.commands.values() if isinstance(found, click.Group) else ()
    return [*found.params, *(given for part in parts for given in part.params)]


def options_of(verb: str) -> set[str]:
    return {"--help", *(name for given in parameters_of(verb) for name in (*given.opts, *given.secondary_opts))}


def commands_in(text: str) -> list[str]:
    """Every `stainlock ...` of code blocks, lines ended by a backslash joined, and of code within lines."""
    blocks = " \n".join(block[0] for block in FENCE.finditer(text)).replace("\\\n", " ")
    shown = [line.strip().removeprefix("$ ") for line in blocks.splitlines()]
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    return [line.partition("#")[0].partition(" | ")[0] for line in shown + inline if line.startswith("stainlock ")]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_and_help(verb: str) -> None:
    text = text_of(DOCS / "verbs" / f"{verb}.md")
    assert text.startswith(f"# {verb}\n")
    assert any(line.split()[1] == verb for line in commands_in(text))
    assert f"({verb}.md)" in text_of(DOCS / "verbs" / "index.md")
    assert f"verbs/{verb}.md" in text_of(ROOT / "mkdocs.yml")
    assert command(verb).help
    assert all(given.help for given in parameters_of(verb) if isinstance(given, click.Option))


def test_there_are_no_pages_of_other_verbs() -> None:
    assert {page.stem for page in (DOCS / "verbs").glob("*.md")} == {*VERBS, "index"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_options_exist(page: Path) -> None:
    for line in commands_in(text_of(page)):
        verb, *rest = line.split()[1:]
        if verb in ("--version", "--help"):
            continue
        assert verb in VERBS, line
        unknown = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)} - options_of(verb)
        assert not unknown, f"{line}: stainlock {verb} has no {unknown}"


@pytest.mark.parametrize("verb", VERBS)
def test_options_named_on_a_verbs_page_are_its_own(verb: str) -> None:
    """In text, `--name` alone is an option of this verb; another verb's is written `verb --name`."""
    text = FENCE.sub("", text_of(DOCS / "verbs" / f"{verb}.md"))
    named = {found.split()[0] for found in re.findall(r"`(--[a-z][^`]*)`", text)}
    assert named <= options_of(verb)


def slug(heading: str) -> str:
    """GitHub's anchor of a heading, which the site's are set to as well."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if page.is_relative_to(DOCS) and path in GENERATED and not target.exists():
            continue
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(target)), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name}: {link}"


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = text_of(ROOT / "mkdocs.yml").partition("\nnav:")[2]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | GENERATED
    assert set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_checkout_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # mentions former names, too
        return
    named = re.findall(r"(?<![\w/])((?:src|tests|benchmarks|docs)/[\w/]+(?:\.\w+)?/?)", text_of(page))
    absent = {name for name in named if "NAME" not in name and not (ROOT / name).exists()}
    assert not absent


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_the_package_exist(page: Path) -> None:
    """`stainlock.locks.layers_in_floats` in text is a module, or something in one."""
    text = text_of(page)
    for name in set(re.findall(r"`(stainlock(?:\.\w+)+)", text)) - {"stainlock.json"}:
        assert resolves(name), f"{page.name}: {name}"


def resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
