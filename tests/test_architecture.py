"""The package has the structure of docs/architecture.md."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import slipstream

PACKAGE = Path(slipstream.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))


def documented() -> dict[str, int]:
    """Folder -> number of lines, highest layer first."""
    table = PAGE.read_text(encoding="utf-8").split("<!-- packages")[1].split("<!-- end of packages")[0]
    return {
        package: int(lines.replace(",", ""))
        for package, lines in re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", table, re.M)
    }


def package_of(parts: tuple[str, ...]) -> str:
    """("drafters", "model") -> "drafters"; ("llm",) -> "llm". `__main__` is the command line."""
    name = parts[0].removesuffix(".py")
    return "cli" if name == "__main__" else name


@cache
def imports() -> list[tuple[Path, str]]:
    """(file, imported module or package) for every import within the package, also inside functions and for types."""
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in SOURCES}
    imported = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                inner = [f"{module}.{alias.name}" for alias in node.names]
                names = [name if name.removeprefix("slipstream.") in modules else module for name in inner]
                names = inner if module == "slipstream" else names
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            imported += [
                (path.relative_to(PACKAGE), name.removeprefix("slipstream."))
                for name in dict.fromkeys(names)
                if name.startswith("slipstream.") and name != "slipstream.__version__"
            ]
    return imported


def test_every_folder_is_documented_with_its_approximate_number_of_lines() -> None:
    counted: Counter[str] = Counter()
    for path in SOURCES:
        counted[package_of(path.relative_to(PACKAGE).parts)] += len(path.read_text(encoding="utf-8").splitlines())
    del counted["__init__"]
    assert set(counted) == set(documented())
    wrong = {
        package: (lines, counted[package])
        for package, lines in documented().items()
        if abs(lines - counted[package]) > 100 + lines / 10
    }
    assert not wrong, f"package: (documented, counted) {wrong}"


def test_imports_point_down() -> None:
    order = {package: i for i, package in enumerate(documented())}
    upward = {
        f"{path} imports {name}"
        for path, name in imports()
        if path != Path("__init__.py") and order[package_of(path.parts)] > order[name.split(".")[0]]
    }
    assert not upward


def test_no_modules_import_each_other_in_a_circle_or_share_a_name() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for path, name in imports():
        graph[".".join(path.with_suffix("").parts)].add(name)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
    names = Counter(path.name for path in SOURCES if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]


def test_no_two_classes_share_a_name() -> None:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES)
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


def test_core_needs_nothing_but_torch_numpy_and_the_standard_library() -> None:
    imported = set()
    for path in (PACKAGE / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) <= {"torch", "numpy", "slipstream"}


def test_no_code_probes_for_what_a_contract_declares() -> None:
    """No `getattr(target, "...")` and `hasattr` on targets, executors, drafters and heads."""
    probes = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                of = ast.unparse(node.args[0])
                if re.search(r"\b(self\.)?_?(target|executor|head|model|drafter|runtime)$", of):
                    probes.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not probes


def test_dir_lists_the_public_names_without_importing_torch() -> None:
    code = """
import slipstream, sys
assert dir(slipstream) == sorted(slipstream.__all__)
assert "torch" not in sys.modules
assert all(getattr(slipstream, name) is not None for name in dir(slipstream))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"LLM", "SamplingParams", "SpeculativeDecoder", "check_pair", "load_model_pair"} <= set(dir(slipstream))
