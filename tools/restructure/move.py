"""Move and merge modules by a table, and rewrite every import of them.

    python tools/restructure/move.py TABLE.toml

The table has one `[[module]]` for each target: `to`, `from` (old modules in the order in which their definitions
appear), `doc` (the new docstring; `@keep` keeps the first module's) and optionally `rename` (`"old.module:name" =
"new_name"`, for names that would collide). A `[symbol]` table moves single definitions: `"old.module:name" =
"new.module"`. A `[package]` table renames whole packages whose modules stay as they are. Symbols keep their names
otherwise: renames of public names are the work of rename.py. Run `ruff check --fix` and `ruff format` afterwards.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

COLLISIONS: list[str] = []
BACKENDS = ("cpu", "cuda", "metal")
ROOTS = {"kvstrata": Path("src/kvstrata"), "tests": Path("tests"), "benchmarks": Path("benchmarks")}


def path_of(module: str) -> Path:
    top, *rest = module.split(".")
    path = ROOTS[top].joinpath(*rest)
    return path / "__init__.py" if path.is_dir() and not path.with_suffix(".py").exists() else path.with_suffix(".py")


def new_path_of(module: str, table: Table) -> Path:
    top, *rest = module.split(".")
    is_package = any(each["to"].startswith(f"{module}.") for each in table.modules)
    path = ROOTS[top].joinpath(*rest)
    return path / "__init__.py" if is_package else path.with_suffix(".py")


@dataclass
class Chunk:
    """A top-level statement with the comments before it."""

    text: str
    names: set[str]
    is_import: bool = False
    node: ast.stmt | None = None


@dataclass
class Module:
    name: str
    doc: str
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def imports(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.is_import]

    @property
    def body(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if not chunk.is_import]

    @property
    def defined(self) -> set[str]:
        return {name for chunk in self.body for name in chunk.names}


def names_in(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.If(body=body):
            return {name for child in body for name in names_in(child)}
    return set()


def read_module(name: str, renames: dict[str, str]) -> Module:
    text = path_of(name).read_text()
    if renames:
        text = rename_tokens(text, renames)
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    body = tree.body
    doc = ast.get_docstring(tree, clean=False) or ""
    start = body[0].end_lineno if doc else 0
    module = Module(name, doc)
    for node in body[1:] if doc else body:
        text_of = "".join(lines[start : node.end_lineno]).strip("\n")
        start = node.end_lineno
        is_import = isinstance(node, ast.Import | ast.ImportFrom) or is_type_checking(node)
        rest = [n for n in node.body if not isinstance(n, ast.ImportFrom)] if isinstance(node, ast.If) else []
        if is_import and isinstance(node, ast.If) and rest:
            guarded = "if TYPE_CHECKING:\n" + "\n".join(f"    {ast.unparse(each)}" for each in rest)
            module.chunks.append(Chunk(guarded, {name for each in rest for name in names_in(each)}))
            node.body = [n for n in node.body if isinstance(n, ast.ImportFrom)]
        module.chunks.append(Chunk(text_of, names_in(node), is_import, node))
    return module


def is_type_checking(node: ast.stmt) -> bool:
    """Whether a block holds imports for the type checker alone."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def rename_tokens(text: str, renames: dict[str, str]) -> str:
    """Rename module-level names: every NAME token that is no attribute."""
    previous = ""
    lines = text.splitlines(keepends=True)
    edits: list[tuple[int, int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in renames and previous != ".":
            edits.append((token.start[0] - 1, token.start[1], token.end[1], renames[token.string]))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.string
    for row, start, end, new in reversed(edits):
        lines[row] = lines[row][:start] + new + lines[row][end:]
    return "".join(lines)


class Table:
    def __init__(self, raw: dict) -> None:
        self.modules = raw.get("module", [])
        self.packages: dict[str, str] = raw.get("package", {})
        self.target: dict[str, str] = {}  # old module to new module
        self.renames: dict[str, dict[str, str]] = defaultdict(dict)  # by old module
        for each in self.modules:
            for old in each["from"]:
                self.target[old] = each["to"]
            for key, new in each.get("rename", {}).items():
                old, name = key.split(":")
                self.renames[old][name] = new
        self.symbols: dict[tuple[str, str], str] = {}
        for key, new in raw.get("symbol", {}).items():
            old, name = key.split(":")
            self.symbols[old, name] = new
        for package, new in self.packages.items():
            folder = path_of(package).parent if path_of(package).name == "__init__.py" else path_of(package)
            for file in sorted(folder.rglob("*.py")):
                parts = file.relative_to(folder).with_suffix("").parts
                if parts[-1] == "__init__":
                    parts = parts[:-1]
                self.target.setdefault(".".join((package, *parts)), ".".join((new, *parts)))

    def place(self, module: str, name: str) -> tuple[str, str]:
        """Return the module and the name of what was `name` in `module`."""
        new_name = self.renames.get(module, {}).get(name, name)
        if (module, name) in self.symbols:
            return self.symbols[module, name], new_name
        return self.target.get(module, module), new_name


def local_name(module: str) -> str:
    """Return the name under which files import a module of a back-end: `cuda_step` for `attention.cuda.step`."""
    *_, folder, last = module.split(".")
    return f"{folder}_{last}" if folder in BACKENDS else last


def rewritten_import(node: ast.ImportFrom, table: Table, here: str) -> tuple[list[str], dict[str, str]]:
    """Return import lines of a `from` import after the move, and names that its file must use in place of others.
    Nothing is imported from `here`."""
    groups: dict[str, list[str]] = defaultdict(list)
    uses: dict[str, str] = {}
    for alias in node.names:
        submodule = f"{node.module}.{alias.name}"
        if submodule in table.target:
            new = table.target[submodule]
            package, _, last = new.rpartition(".")
            local = alias.asname or local_name(new)
            if local != alias.name and not alias.asname:
                uses[alias.name] = local
            entry = f"{last} as {local}" if local != last else last
            if entry not in groups[package]:
                groups[package].append(entry)
            continue
        module, name = table.place(node.module or "", alias.name)
        local = alias.asname or alias.name
        if module == here:
            if local != name:
                uses[local] = name
            continue
        if name != alias.name and not alias.asname:
            uses[alias.name] = name
        groups[module].append(f"{name} as {alias.asname}" if alias.asname else name)
    lines = [f"from {module} import {', '.join(names)}" for module, names in groups.items()]
    return lines, uses


def rewrite_file(text: str, table: Table, here: str) -> str:
    """Rewrite the imports of one file, those inside functions too."""
    uses: dict[str, str] = {}
    edits: list[tuple[int, int, list[str]]] = []  # first and last line, new lines
    lines = text.splitlines(keepends=True)
    for node in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom | ast.Import)):
        indent = " " * node.col_offset
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in table.target:
                    line = lines[node.lineno - 1].replace(alias.name, table.target[alias.name])
                    edits.append((node.lineno, node.lineno, [line]))
            continue
        is_moved = any(
            f"{node.module}.{alias.name}" in table.target
            or table.place(node.module or "", alias.name) != (node.module, alias.name)
            for alias in node.names
        )
        if not is_moved:
            continue
        new_lines, new_uses = rewritten_import(node, table, here)
        uses |= new_uses
        tail = "  # noqa: F401" if "noqa: F401" in lines[node.end_lineno - 1] else ""
        edits.append((node.lineno, node.end_lineno, [f"{indent}{line}{tail}\n" for line in new_lines]))
    # Uses are renamed first: the new import lines have their names already.
    lines = (rename_tokens(text, uses) if uses else text).splitlines(keepends=True)
    for first, last, new_lines in sorted(edits, reverse=True):
        lines[first - 1 : last] = new_lines
    return "".join(lines)


def merged_text(target: dict, table: Table) -> str:
    modules = [read_module(old, table.renames.get(old, {})) for old in target["from"]]
    imports: dict[str, None] = {}
    checking: dict[str, None] = {}
    chunks: list[str] = []
    seen: dict[str, str] = {}
    uses: dict[str, str] = {}
    extra = [
        (old, name) for (old, name), to in table.symbols.items() if to == target["to"] and old not in target["from"]
    ]
    modules += [read_module(old, table.renames.get(old, {})) for old in dict.fromkeys(old for old, _ in extra)]
    for module in modules:
        is_donor = module.name not in target["from"]
        wanted = {name for old, name in extra if old == module.name} if is_donor else None
        for chunk in module.imports:
            node = chunk.node
            nodes = node.body if isinstance(node, ast.If) else [node]
            into = checking if isinstance(node, ast.If) else imports
            for each in nodes:
                if isinstance(each, ast.ImportFrom):
                    new_lines, new_uses = rewritten_import(each, table, target["to"])
                    uses |= new_uses
                    into.update(dict.fromkeys(new_lines))
                else:
                    into[ast.unparse(each)] = None
        if is_donor or any(old == module.name for old, _ in table.symbols):
            # What a split module's parts need of each other.
            for name in sorted(module.defined):
                place, new = table.place(module.name, name)
                if place != target["to"]:
                    imports[f"from {place} import {new}"] = None
        for chunk in module.body:
            names = chunk.names
            if wanted is not None and not names & wanted:
                continue
            if wanted is None and any(
                table.symbols.get((module.name, name), target["to"]) != target["to"] for name in names
            ):
                continue
            for name in names:
                if name in seen and chunk.text not in chunks and seen[name] != module.name:
                    COLLISIONS.append(f"{target['to']}: {name} is defined in {seen[name]} and in {module.name}")
                if chunk.text in chunks:
                    break
                seen[name] = module.name
            else:
                chunks.append(chunk.text)
    doc = modules[0].doc if target["doc"] == "@keep" else target["doc"]
    header = [f'"""{doc.strip()}\n"""' if "\n" in doc.strip() else f'"""{doc.strip()}"""']
    header.append("\n".join(imports))
    if checking:
        header.append("if TYPE_CHECKING:\n" + "\n".join(f"    {line}" for line in checking))
    body = "\n\n".join(chunks) + "\n"
    return "\n\n".join([*header, rename_tokens(body, uses) if uses else body])


def main() -> None:
    table = Table(tomllib.loads(Path(sys.argv[1]).read_text()))
    merged_old = {old for each in table.modules for old in each["from"]}
    results = {each["to"]: merged_text(each, table) for each in table.modules}
    if COLLISIONS:
        raise SystemExit("\n".join(COLLISIONS))
    everything = {
        ".".join((top, *file.relative_to(root).with_suffix("").parts)): file
        for top, root in ROOTS.items()
        for file in sorted(root.rglob("*.py"))
    }
    for name, file in everything.items():
        module = name.removesuffix(".__init__")
        if module in merged_old:
            continue
        text = file.read_text()
        new = rewrite_file(text, table, table.target.get(module, module))
        if new != text:
            file.write_text(new)
    for each in table.modules:
        new_file = new_path_of(each["to"], table)
        new_file.parent.mkdir(parents=True, exist_ok=True)
        first = path_of(each["from"][0])
        for old in each["from"][1:]:
            subprocess.run(["git", "rm", "-qf", str(path_of(old))], check=True)
        if first != new_file:
            subprocess.run(["git", "mv", "-f", str(first), str(new_file)], check=True)
        new_file.write_text(results[each["to"]])
    for old, new in table.packages.items():
        old_folder, new_folder = (ROOTS[top].joinpath(*rest) for top, *rest in (old.split("."), new.split(".")))
        if not old_folder.exists():
            continue
        for file in sorted(old_folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                place = new_folder / file.relative_to(old_folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                if place.exists() and file.name == "__init__.py":
                    subprocess.run(["git", "rm", "-qf", str(file)], check=True)
                else:
                    subprocess.run(["git", "mv", str(file), str(place)], check=True)


main()
