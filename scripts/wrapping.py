"""Finds and rewraps lines of prose that are too long: comments in Go and proto, comments and
docstrings in Python, and paragraphs in Markdown.

Only prose is measured. Code, trailing comments, directives, indented examples, tables, and code
blocks are left as they are, and so are lines that a URL or a link makes long.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive lines of prose in a file.

    first: index of the first line. lines: their text without the prefixes and without ``suffix``.
    head: the text before the first line; prefix: the text before each other line. suffix: the end
    of the last line, for example triple quotes.
    """

    first: int
    lines: list[str]
    head: str
    prefix: str
    suffix: str = ""
    markdown: bool = False

    def wrapped(self, width: int) -> list[str]:
        """The lines of the file, with overlong paragraphs wrapped again."""
        text = [*self.lines[:-1], self.lines[-1] + self.suffix]
        out = _fill(text, width - len(self.prefix), len(self.head) - len(self.prefix), self.markdown)
        return [(self.prefix if number else self.head) + line for number, line in enumerate(out)]


def wrap(path: Path, text: str, width: int = WIDTH) -> str:
    """The text of a file with its prose wrapped."""
    lines = text.split("\n")
    for block in reversed(blocks(path, text)):
        new = [line.rstrip() for line in block.wrapped(width)]
        lines[block.first : block.first + len(block.lines)] = new
    return "\n".join(lines)


def too_long(path: Path, text: str, width: int = WIDTH) -> list[int]:
    """The numbers of the lines, from 1, that ``wrap`` would break."""
    lines = text.split("\n")
    found: list[int] = []
    for block in blocks(path, text):
        old = lines[block.first : block.first + len(block.lines)]
        if [line.rstrip() for line in block.wrapped(width)] != [line.rstrip() for line in old]:
            found += [block.first + n for n, line in enumerate(old, 1) if len(line) > width] or [block.first + 1]
    return found


def blocks(path: Path, text: str) -> list[Block]:
    """The prose of a file, in order; empty if files of this kind are not wrapped."""
    find: dict[str, Callable[[str], Iterator[Block]]] = {".go": _slashes, ".proto": _slashes, ".py": _python, ".md": _markdown}
    return sorted(find.get(path.suffix, lambda _: iter(()))(text), key=lambda block: block.first)


# ---- where the prose is ---------------------------------------------------------------------------

_SLASHES = re.compile(r"^(\s*)//( .*|)$")
_OUTPUT = re.compile(r"^\s*// (Unordered )?[Oo]utput:")
_HASH_DIRECTIVE = re.compile(r"^#(!|:|\s*(type|pyright|mypy|ruff|fmt|noqa|pragma|isort|///|-\*-)\b|\s*/// )")


def _slashes(text: str) -> Iterator[Block]:
    lines = text.split("\n")
    comments: list[tuple[int, str, str]] = []  # line, indent, text
    raw = 0  # backticks seen: an odd number means that a Go raw string is open
    for number, line in enumerate(lines):
        found = _SLASHES.match(line)
        if found and raw % 2 == 0:
            comments.append((number, found[1], found[2][1:]))
        elif not found:
            raw += re.sub(r"'`'|\"(\\.|[^\"\\])*\"|//.*", "", line).count("`") if raw % 2 == 0 else line.count("`")
    yield from _comment_blocks(comments, "//", lambda number: bool(_OUTPUT.match(lines[number])))


def _python(text: str) -> Iterator[Block]:
    lines = text.split("\n")
    comments: list[tuple[int, str, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue  # code, or a comment after code
        if re.match(r"#( |$)", token.string) and not _HASH_DIRECTIVE.match(token.string):
            comments.append((token.start[0] - 1, " " * token.start[1], token.string[2:]))
    yield from _comment_blocks(comments, "#", lambda _: False)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            block = _docstring(lines, node.value)
            if block is not None:
                yield block


def _comment_blocks(comments: Sequence[tuple[int, str, str]], mark: str, ends: Callable[[int], bool]) -> Iterator[Block]:
    """Groups comment lines that follow each other at one indentation."""
    for (_, indent), group in groupby(enumerate(comments), key=lambda pair: (pair[1][0] - pair[0], pair[1][1])):
        members = [member for _, member in group]
        if any(ends(number) for number, _, _ in members):
            continue
        prefix = f"{indent}{mark} "
        yield Block(members[0][0], [text for _, _, text in members], prefix, prefix)


def _docstring(lines: list[str], node: ast.Constant) -> Block | None:
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    head = re.match(r'\s*[rR]?"""', lines[first])
    if head is None or not lines[last].endswith('"""'):
        return None
    body = lines[first : last + 1]
    body[0] = body[0][head.end() :]
    body[-1] = body[-1][:-3]
    indent = re.match(r"\s*", lines[first])
    prefix = indent[0] if indent else ""
    if any(line.strip() and not line.startswith(prefix) for line in body[1:]):
        return None
    return Block(first, [body[0], *(line[len(prefix) :] for line in body[1:])], head[0], prefix, '"""')


def _markdown(text: str) -> Iterator[Block]:
    lines = text.split("\n")
    start = lines.index("---", 1) + 1 if lines[0] == "---" and "---" in lines[1:] else 0  # after the front matter
    if lines[start:]:
        yield Block(start, lines[start:], "", "", markdown=True)


# ---- how it is filled -----------------------------------------------------------------------------

_BULLET = re.compile(r"^(\s*)([-*+•]|\d+[.)])(\s+)")
_FENCE = re.compile(r"^\s*(```|~~~)")
_DEFINITION = re.compile(r"^[`\[]*[\w./<>-]+[`\]]*:( |$)")
_VERBATIM = re.compile(r"^\s*(\||#|<|>|\[[^]]+\]: |:?-{3,}|={3,}|:\w+:|\.\. |Deprecated:)|^\s*\S.*\S {3,}\S")
_TOKEN = re.compile(r"(?:``[^`]*``|`[^`]*`|[^\s`]|`)+")
_MARKUP = re.compile(r"^([-*+>|=]+|#\S*|\d+[.)]|\+build.*|[Oo]utput:|(type|noqa|pyright|mypy|fmt|ruff):.*|go:\S*)$")


def _fill(lines: list[str], width: int, offset: int, markdown: bool) -> list[str]:
    """offset: how much more the first line is indented than the others."""
    out: list[str] = []
    at = 0
    literal: int | None = None  # the indentation of the paragraph that introduced a literal block
    while at < len(lines):
        line = lines[at]
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            out.append(line)
            at += 1
            continue
        if literal is not None and indent > literal:
            out.append(line)
            at += 1
            continue
        literal = None
        if _FENCE.match(line):
            end = next((n for n in range(at + 1, len(lines)) if _FENCE.match(lines[n])), len(lines) - 1)
            out += lines[at : end + 1]
            at = end + 1
            continue
        bullet = _BULLET.match(line)
        end = _end(lines, at, indent, bullet)
        unit = lines[at:end]
        extra = offset if at == 0 else 0
        literal = indent if unit[-1].rstrip().endswith("::") else None
        example = not bullet and (indent >= 4 if markdown else indent > 0)
        if example or _VERBATIM.match(line) or line.lstrip().startswith(">>>") or _fits(unit, width, extra):
            out += unit
        else:
            out += _paragraph(unit, width, extra, bullet)
        at = end
    return out


def _end(lines: list[str], at: int, indent: int, bullet: re.Match[str] | None) -> int:
    """The index after the last line of the paragraph or list item that starts at ``at``."""
    end = at + 1
    while end < len(lines):
        line = lines[end]
        here = len(line) - len(line.lstrip())
        if not line.strip() or line.strip() == '"""' or _BULLET.match(line) or _FENCE.match(line) or _VERBATIM.match(line):
            break
        if here <= indent if bullet else here != indent:
            break
        if lines[end - 1].endswith(("  ", "\\")) or _VERBATIM.match(lines[end - 1]):
            break
        if not bullet and _DEFINITION.match(line.lstrip()) and lines[end - 1].rstrip().endswith((".", ":", ";")):
            break
        end += 1
    return end


def _fits(unit: list[str], width: int, extra: int) -> bool:
    return all(len(line) + (extra if n == 0 else 0) <= width for n, line in enumerate(unit))


def _paragraph(unit: list[str], width: int, extra: int, bullet: re.Match[str] | None) -> list[str]:
    first = bullet[0] if bullet else unit[0][: len(unit[0]) - len(unit[0].lstrip())]
    rest = " " * len(first)
    if bullet and len(unit) > 1:  # the indentation of the item
        rest = unit[1][: len(unit[1]) - len(unit[1].lstrip())]
    words = _words(" ".join([unit[0][len(first) :], *unit[1:]]))
    out, line, room = [], first + words[0], width - extra
    for word in words[1:]:
        if len(line) + 1 + len(word) > room:
            out.append(line)
            line, room = rest + word, width
        else:
            line += " " + word
    return [*out, line]


def _words(text: str) -> list[str]:
    """The parts that may not be broken: words, code spans, and a word with markup that would have
    another meaning at the start of a line."""
    words: list[str] = []
    for word in _TOKEN.findall(text):
        if words and _MARKUP.match(word):
            words[-1] += " " + word
        else:
            words.append(word)
    return words
