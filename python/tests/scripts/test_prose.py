"""scripts/prose.py and scripts/wrapping.py: what is counted, what is wrapped, and what is left alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import prose  # noqa: E402
import wrapping  # noqa: E402

LONG = "The scheduler publishes groups while the run has room for them, and it stops when the buffer holds enough for a step."
AGAIN = "It continues when the learner has committed the step and the buffer has released the groups of it."


def wrapped(name: str, text: str, width: int = 60) -> str:
    out = wrapping.wrap(Path(name), text, width)
    assert wrapping.wrap(Path(name), out, width) == out, "wrapping twice changes nothing"
    assert wrapping.too_long(Path(name), out, width) == []
    return out


def widest(text: str) -> int:
    return max(map(len, text.split("\n")))


def test_go_comments_are_filled_and_code_is_kept() -> None:
    code = f'var s = "{LONG}" // {LONG}\n'
    out = wrapped("a.go", f"// F runs. {LONG}\n// {AGAIN}\n//\n// {LONG}\nfunc F() {{}}\n\n{code}")
    comment = out.split("func")[0]
    assert widest(comment) <= 60
    assert comment.replace("\n// ", " ").replace("\n//\n", "|") == f"// F runs. {LONG} {AGAIN}\n//\n// {LONG}\n".replace(
        "\n// ", " "
    ).replace("\n//\n", "|")
    assert out.endswith(code)


@pytest.mark.parametrize(
    "text",
    [
        f"//go:generate tool {LONG}\n",
        f"//nolint:all // {LONG}\n",
        f"// Doc:\n//\n//\tcode {LONG}\n",
        f"// Output:\n// {LONG}\n",
        f"var s = `\n// {LONG}\n`\n",
        f"// # {LONG}\n",
        "// https://example.com/" + "a/" * 50 + "\n",
    ],
)
def test_go_text_that_is_kept(text: str) -> None:
    assert wrapped("a.go", text) == text


def test_go_lists_hang() -> None:
    out = wrapped("a.go", f"// Steps:\n//   - {LONG}\n//   - b\n")
    assert out.startswith("// Steps:\n//   - The scheduler publishes")
    assert all(line.startswith(("//   - ", "//     ", "// Steps")) for line in out.strip().split("\n"))
    assert out.endswith("\n//   - b\n")


def test_lines_that_fit_keep_their_breaks() -> None:
    text = "// One.\n// Two, which could\n// be filled.\n"
    assert wrapped("a.go", text) == text


def test_python_docstrings_and_comments() -> None:
    text = f'''def f() -> str:
    """{LONG}

    key: {LONG}

        >>> f()  # {LONG}

    - {AGAIN}
    """
    # {LONG}
    x = "# {LONG}"  # {LONG}
    #: {LONG}
    # type: ignore {LONG}
    return """
    # {LONG}
    """
'''
    out = wrapped("a.py", text)
    assert ast.unparse(_without_docstrings(out)) == ast.unparse(_without_docstrings(text))
    doc, old = (ast.get_docstring(_function(t)) or "" for t in (out, text))
    assert doc.split() == old.split()
    kept = [line for line in out.split("\n") if len(line) > 60]
    assert kept == [line for line in text.split("\n") if line.strip().startswith((">>>", "x =", "#:", "# type:"))] + [
        f"    # {LONG}"
    ]


def test_closing_quotes_have_room() -> None:
    text = f'class A:\n    """{"a" * 45} {"b" * 6}"""\n'
    assert wrapped("a.py", text) == f'class A:\n    """{"a" * 45}\n    {"b" * 6}"""\n'


def test_indented_examples_and_literal_blocks_of_docstrings_are_kept() -> None:
    text = f'"""Head.\n\n    make x   {LONG}\n\nRun::\n\n  {LONG}\n"""\n'
    assert wrapped("a.py", text) == text


def test_markdown() -> None:
    kept = f"# {LONG}\n\n| {LONG} |\n|---|\n| b |\n\n```sh\n{LONG}\n```\n\n    {LONG}\n\n<p>{LONG}</p>\n\n"
    out = wrapped("a.md", f"{kept}{LONG}\n\n1. {LONG}\n   {AGAIN}\n2. b\n\n- [link](#a) {LONG}\n")
    assert out.startswith(kept)
    rest = out[len(kept) :]
    assert widest(rest) <= 60
    assert "\n   " in rest and "\n2. b\n" in rest and "\n  " in rest.split("- [link]")[1]


def test_words_that_would_become_markup_stay_behind_their_word() -> None:
    for word in ("-", "+", "#1", "2."):
        out = wrapped("a.md", f"{'a' * 28} {'b' * 29} {word} c\n", 60)
        assert not any(line.startswith(word) for line in out.split("\n"))


def test_code_spans_are_not_broken() -> None:
    assert "`make bench ARGS=one`" in wrapped("a.md", f"{'a' * 50} `make bench ARGS=one` and so on.\n")


def test_findings_name_the_line_and_the_phrase() -> None:
    rules = prose.Rules.load(ROOT / "scripts" / "prose.yaml")
    text = "Nobody reads the shelf,\nand the run goes on anew.\nThe line queue is held.\n"
    found = list(prose.find(Path("a.txt"), text, rules))
    assert [(f.line, f.phrase) for f in found] == [(1, "nobody"), (1, "shelf"), (2, "goes on"), (2, "anew")]


def test_every_phrase_has_a_replacement_and_compiles() -> None:
    rules = prose.Rules.load(ROOT / "scripts" / "prose.yaml")
    assert rules.limit == 0.6 and rules.width == 100
    assert all(write and not pattern.search("the trainer sends weights to the engine") for pattern, write in rules.phrases)


def _function(text: str) -> ast.FunctionDef:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _without_docstrings(text: str) -> ast.Module:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return tree
