"""Chat and edit pairs made from source files by a program, so that every answer is right by construction.

Edit pairs teach a small model to copy: the answer repeats the question's snippet except for one change.
n-gram drafting works on repeated text, so a demonstration model must be able to produce it.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import random
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.embedded.corpus import SourceFile


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words(
    "value item name path data result index count node key entry line text size offset buffer token state "
    "field record source target limit total start stop width height label group member option config "
    "handler parser message header payload block chunk queue stack table column row score weight length "
    "factor rate step depth level prefix suffix pattern target child parent root branch leaf edge vertex "
    "origin client server request"
)
ADJECTIVES = _words(
    "new old first last current previous next base raw local main inner outer temp final initial user "
    "input output default extra max min total active cached shared remote clean short long left right "
    "upper lower known"
)
VERBS = _words("get set make build load read write parse find check update compute collect create resolve apply run")
RESERVED = set(keyword.kwlist) | set(keyword.softkwlist) | set(dir(builtins)) | {"self", "cls", "args", "kwargs"}


@dataclass(frozen=True)
class Pair:
    """One exchange: `user` asks, `assistant` answers; `kind` names the generator ("write", "rename", ...)."""

    kind: str
    user: str
    assistant: str


def functions(text: str, lines: tuple[int, int] = (5, 30)) -> list[tuple[str, ast.FunctionDef]]:
    """Source and tree of every function, dedented, whose length in lines is within `lines` (inclusive)."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    rows, pairs = text.split("\n"), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            last = node.end_lineno or node.lineno
            if lines[0] <= last - first + 1 <= lines[1]:
                source = textwrap.dedent("\n".join(rows[first - 1 : last]))
                if parses(source):
                    pairs.append((source, node))
    return pairs


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def names_of(source: str) -> list[tokenize.TokenInfo]:
    """Identifiers of a snippet that may be renamed: not reserved, not attributes, not keyword arguments."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return []
    return [t for t in tokens if t.type == tokenize.NAME]


def rename(source: str, old: str, new: str) -> str:
    """Replace every occurrence of the word `old`, in code, strings and comments."""
    return re.sub(rf"\b{re.escape(old)}\b", new, source)


def fresh_name(rng: random.Random, source: str, verb: bool = False) -> str:
    """An identifier that does not occur in `source`."""
    while True:
        name = rng.choice(NOUNS)
        if rng.random() < 0.7:
            name = f"{rng.choice(ADJECTIVES)}_{name}"
        if verb:
            name = f"{rng.choice(VERBS)}_{name}"
        if not re.search(rf"\b{name}\b", source):
            return name


def edit_rename(rng: random.Random, source: str, node: ast.FunctionDef) -> tuple[str, str] | None:
    """Rename a variable or an argument."""
    local = {a.arg for a in node.args.args + node.args.kwonlyargs}
    local |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    used = {t.string for t in names_of(source)}
    options = sorted(n for n in local & used if n not in RESERVED and len(n) > 1)
    if not options:
        return None
    old = rng.choice(options)
    new = fresh_name(rng, source)
    ask = rng.choice(
        (
            f"Rename the variable `{old}` to `{new}`.",
            f"Rename `{old}` to `{new}` everywhere.",
            f"Replace the name `{old}` with `{new}`.",
            f"Change `{old}` to `{new}` in this code.",
        )
    )
    return ask, rename(source, old, new)


def edit_function_name(rng: random.Random, source: str, node: ast.FunctionDef) -> tuple[str, str] | None:
    """Rename the function."""
    if node.name.startswith("__"):
        return None
    new = fresh_name(rng, source, verb=True)
    ask = rng.choice(
        (
            f"Rename the function `{node.name}` to `{new}`.",
            f"Rename the function to `{new}`.",
            f"Call this function `{new}` instead of `{node.name}`.",
        )
    )
    return ask, rename(source, node.name, new)


def edit_number(rng: random.Random, source: str, node: ast.FunctionDef) -> tuple[str, str] | None:
    """Change a number that occurs once."""
    numbers = re.findall(r"(?<![\w.])\d+(?![\w.])", source)
    once = sorted({n for n in numbers if numbers.count(n) == 1})
    if not once:
        return None
    old = rng.choice(once)
    new = str(rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 25, 32, 50, 64, 100, 128, 200, 256, 300, 512, 1000)))
    if new == old:
        return None
    ask = rng.choice(
        (f"Change the number {old} to {new}.", f"Replace {old} with {new}.", f"Use {new} instead of {old}.")
    )
    return ask, re.sub(rf"(?<![\w.]){old}(?![\w.])", new, source)


def edit_string(rng: random.Random, source: str, node: ast.FunctionDef) -> tuple[str, str] | None:
    """Change a short string that occurs once."""
    strings = re.findall(r"(?<![\w\"'])(\"[A-Za-z_\- .]{2,24}\"|'[A-Za-z_\- .]{2,24}')(?![\"'])", source)
    once = sorted({s for s in strings if source.count(s) == 1})
    if not once:
        return None
    old = rng.choice(once)
    new = old[0] + fresh_name(rng, source) + old[-1]
    ask = rng.choice((f"Change the string {old} to {new}.", f"Replace {old} with {new}."))
    return ask, source.replace(old, new)


def edit_comment(rng: random.Random, source: str, node: ast.FunctionDef) -> tuple[str, str] | None:
    """Add a comment line at the top."""
    words = node.name.strip("_").replace("_", " ")
    about = rng.choice((words, f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", f"{rng.choice(VERBS)} the {words}"))
    comment = rng.choice(("# ", "# TODO: ", "# Note: ")) + about
    ask = rng.choice((f"Add the comment `{comment}` at the top.", f"Put the line `{comment}` above the function."))
    return ask, f"{comment}\n{source}"


def edit_type_hint(rng: random.Random, source: str, node: ast.FunctionDef) -> tuple[str, str] | None:
    """Annotate one plain argument, or the return value."""
    end = re.search(r"\):\n", source)
    if node.returns is None and end and rng.random() < 0.5:
        kind = rng.choice(("None", "str", "int", "bool", "list", "dict", "float", "bytes"))
        ask = rng.choice((f"Add the return type `{kind}`.", f"Annotate the return value as `{kind}`."))
        return ask, source[: end.start()] + f") -> {kind}:\n" + source[end.end() :]
    plain = [a.arg for a in node.args.args if a.annotation is None and a.arg not in ("self", "cls")]
    if not plain:
        return None
    name = rng.choice(plain)
    kind = rng.choice(("str", "int", "bool", "list", "dict", "float", "bytes", "object"))
    ask = rng.choice((f"Add the type hint `{kind}` to `{name}`.", f"Annotate the argument `{name}` as `{kind}`."))
    head = re.compile(rf"(def \w+\((?:[^()]*?[\s,])?){name}(?=\s*[,)=])")
    done, count = head.subn(rf"\g<1>{name}: {kind}", source, count=1)
    return (ask, done) if count else None


def edit_delete(rng: random.Random, source: str, node: ast.FunctionDef) -> tuple[str, str] | None:
    """Delete one line that occurs once and without which the snippet still parses."""
    rows = source.split("\n")
    options = [i for i, r in enumerate(rows) if i and 8 < len(r.strip()) < 70 and rows.count(r) == 1]
    if not options:
        return None
    at = rng.choice(options)
    line = rows[at].strip()
    if sum(r.strip() == line for r in rows) > 1 or "`" in line:
        return None
    ask = rng.choice((f"Delete the line `{line}`.", f"Remove `{line}`."))
    return ask, "\n".join(rows[:at] + rows[at + 1 :])


EDITS = {
    "rename": edit_rename,
    "function": edit_function_name,
    "number": edit_number,
    "string": edit_string,
    "comment": edit_comment,
    "hint": edit_type_hint,
    "delete": edit_delete,
}
WEIGHTS = (5, 3, 2, 2, 2, 2, 2)


def edit_pair(rng: random.Random, source: str, node: ast.FunctionDef) -> Pair | None:
    """One edit request with its exact answer, or None when the drawn edit does not apply to this snippet."""
    kind = rng.choices(list(EDITS), WEIGHTS)[0]
    edit = EDITS[kind](rng, source, node)
    if edit is None or edit[1] == source or not parses(edit[1]):
        return None
    ask, after = edit
    before_code = rng.random() < 0.5
    user = f"{ask}\n\n{source}" if before_code else f"{source}\n\n{ask}"
    return Pair(kind, user, after)


def write_pair(rng: random.Random, source: str, node: ast.FunctionDef) -> Pair | None:
    """A request to write a documented function, with the function as the answer."""
    doc = ast.get_docstring(node)
    if not doc or node.decorator_list or len(doc) > 600:
        return None
    summary = " ".join(doc.split("\n\n")[0].split())
    if not 15 <= len(summary) <= 240:
        return None
    signature = f"{node.name}({', '.join(a.arg for a in node.args.args)})"
    user = rng.choice(
        (
            f"Write a Python function `{signature}`. {summary}",
            f"Write the function `{signature}`: {summary}",
            f"Implement `{signature}` in Python.\n\n{summary}",
            f"Please write `{signature}`. {summary}",
        )
    )
    return Pair("write", user, source)


def make_pairs(file: SourceFile, edits_per_function: float = 0.35) -> Iterator[Pair]:
    """Chat and edit pairs of one file; deterministic in the file's name and text.

    Args:
        edits_per_function: expected number of edit pairs drawn from a function of 5 to 30 lines.
    """
    rng = random.Random(f"{file.package}/{file.path}")
    for source, node in functions(file.text):
        if len(source) > 1400:
            continue
        written = write_pair(rng, source, node)
        if written:
            yield written
        if rng.random() < edits_per_function:
            for _ in range(4):
                edited = edit_pair(rng, source, node)
                if edited:
                    yield edited
                    break
