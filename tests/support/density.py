"""Print how dense the code of the package is, next to the goal.

Size is counted in AST nodes, because they do not depend on line breaks. No test fails because of
these figures. They only show where to look, and readers decide.

`python -m tests.support.density` prints the package; `--rooms` adds a line for each folder.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CONTEXTS = (ast.Load, ast.Store, ast.Del)
PER_10_000 = ("tuple assignments", "ternaries", "comprehensions", "walruses", "multi-for")
GOAL = {
    "nodes": 235_000.0,
    "nodes per statement": 7.5,
    "tuple assignments": 2.0,
    "ternaries": 30.0,
    "comprehensions": 35.0,
    "walruses": 1.5,
    "multi-for": 2.0,
}


def counts_of(folder: Path) -> Counter[str]:
    """Count the constructs in all Python files of a folder and its subfolders."""
    counts: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        for statement in _statements(ast.parse(path.read_text("utf-8"))):
            counts["statements"] += 1
            for node in _own_nodes(statement):
                counts["nodes"] += 1
                counts.update(_constructs(node))
    return counts


def figures(counts: Counter[str]) -> dict[str, float]:
    """Return the figures of the table: the nodes, and the constructs per 10,000 nodes."""
    nodes = max(counts["nodes"], 1)
    found = {
        "nodes": float(counts["nodes"]),
        "nodes per statement": nodes / max(counts["statements"], 1),
    }
    for name in PER_10_000:
        found[name] = 10_000 * counts[name] / nodes
    return found


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield every statement except docstrings."""
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_string:
            yield node


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of one statement, without the statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, CONTEXTS):
            yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                waiting.append(child)


def _constructs(node: ast.AST) -> Iterator[str]:
    """Yield the name of each counted construct that this node is."""
    if isinstance(node, ast.IfExp):
        yield "ternaries"
    elif isinstance(node, ast.NamedExpr):
        yield "walruses"
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        if any(isinstance(target, ast.Tuple) for target in node.targets):
            yield "tuple assignments"
    elif isinstance(node, COMPREHENSIONS):
        yield "comprehensions"
        nested = sum(isinstance(child, COMPREHENSIONS) for child in ast.walk(node)) > 1
        if nested or len(node.generators) > 1:
            yield "multi-for"


def _line(name: str, values: dict[str, float]) -> str:
    nodes, *others = values.values()
    return f"{name:28}{nodes:>10,.0f}" + "".join(f"{value:>20.1f}" for value in others)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", action="store_true")
    given = parser.parse_args()
    heads = list(GOAL)
    lines = [f"{'density':28}{heads[0]:>10}" + "".join(f"{head:>20}" for head in heads[1:])]
    if given.rooms:
        for room in sorted(path.parent for path in (ROOT / "lflops").glob("*/__init__.py")):
            lines.append(_line(room.name, figures(counts_of(room))))
    lines.append(_line("lflops", figures(counts_of(ROOT / "lflops"))))
    lines.append(_line("goal", GOAL))
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main()
