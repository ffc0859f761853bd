"""Templates: what each may hold, of which types and sizes, before anything is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stainlock.errors import FileError
from stainlock.services.template import Template

GOOD = '[response]\nlabels = "a"\n'


def load(text: str, folder: Path) -> Template:
    path = folder / "template.toml"
    path.write_text(text, encoding="utf-8")
    return Template.load(path)


def test_a_whole_template_is_read(tmp_path: Path) -> None:
    request = '[request]\nkind = "multipart"\nmethod = "put"\ncanvas = [64, 32]\nfields = { size = 3 }\n'
    found = load(f'{request}headers = {{ X-Key = "a b" }}\n{GOOD}first = 1\n[limits]\nper_second = 2\n', tmp_path)
    assert (found.method, found.canvas, found.fields) == ("PUT", (64, 32), {"size": "3"})
    assert (found.headers, found.classes.first, found.per_second) == ({"X-Key": "a b"}, 1, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("headers = 3", "expected a table as headers in"),
        ("fields = [1]", "expected a table as fields in"),
        ("fields = { a = [1] }", "as a of fields"),
        ("method = 3", "expected text as method"),
        ('method = "A B"', "expected a method like POST"),
        ("canvas = [100000, 100000]", "expected a canvas of two whole numbers"),
        ("canvas = [1.5, 2]", "expected a canvas of two whole numbers"),
        ("canvas = [64]", "expected a canvas of two whole numbers"),
        ('headers = { "A\\r\\nB" = "c" }', "expected a header on one line"),
        ('headers = { A = "c\\r\\nEvil: d" }', "expected a header on one line"),
        ('field = "a\\nb"', "without quotes and line breaks"),
        (f'kind = "json"\nbody = [{"[" * 40}"{{picture}}"{"]" * 40}]', "nested at most 32 deep"),
        ("surplus = 1", "got surplus"),
        (f"body = {'[' * 5000}{']' * 5000}", "expected TOML"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileError) as raised:
        load(f"[request]\n{text}\n{GOOD}", tmp_path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("text", ["first = 1.5", 'first = "1"', "classes = 3", "label = 1", 'classes = "missing.txt"'])
def test_the_answers_form_is_checked(text: str, tmp_path: Path) -> None:
    with pytest.raises(FileError):
        load(f"{GOOD}{text}\n", tmp_path)
