"""The tables of docs/architecture.md, docs/reference.md, docs/next.md, bench/faults.md and docs/security.md that code
and tests decide. `python -m tests.docs` writes them anew."""

import re
from collections.abc import Iterable
from pathlib import Path

from flash_mcp.protocol.errors import CODES
from flash_mcp.protocol.spec import RECIPES, RunSpec, default_of
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared.next_steps import RULES
from tests import hostile, rooms

PLAYBOOK = Path(__file__).parent.parent / "TRAINING.md"
REFERENCE = Path(__file__).parent.parent / "docs" / "reference.md"
ENVIRONMENTS = Path(__file__).parent.parent / "docs" / "environments.md"
FAULTS = Path(__file__).parent.parent / "bench" / "faults.md"
SECURITY = Path(__file__).parent.parent / "docs" / "security.md"
ARCHITECTURE = Path(__file__).parent.parent / "docs" / "architecture.md"
NEXT = Path(__file__).parent.parent / "docs" / "next.md"


def tables(page: Path) -> dict[str, str]:
    if page == FAULTS:
        acts = table(("acts", "held", "what they try", "tests"), hostile.rows())
        return {"hostile": acts, "open": table(("open act", "reason"), hostile.reasons())}
    if page == SECURITY:
        acts_of_all, held, *_ = hostile.rows()[-1]
        return {"acts": f"{acts_of_all} acts, {held} of them held. Those that are not are listed there."}
    if page == ARCHITECTURE:
        return {"rooms": table(("behind a door", "files", "brings", "lines"), rooms.rows())}
    if page == NEXT:
        return {"next": following()}
    return {"fields": fields(), "codes": codes(), "tools": tools()}


def fields() -> str:
    rows = []
    for name, info in RunSpec.model_fields.items():
        common = default_of(name)
        values = [recipe.get(name, common) for recipe in RECIPES.values()]
        shown = ["-" if value in (None, [], {}) else f"{value}" for value in values]
        rows.append((f"`{name}`", *shown, " ".join(str(info.description).split())))
    return table(("field", *RECIPES, "what it is"), rows)


def codes() -> str:
    return table(("error code", "what happened"), [(f"`{code}`", meaning) for code, meaning in CODES.items()])


def tools() -> str:
    rows = [(f"`{tool.name}`", " ".join(tool.description.split("\n\n")[0].split())) for tool in TOOLS.values()]
    return table(("tool", "does"), rows)


def following() -> str:
    rows = [(rule.when, rule.then) for rule in RULES]
    return table(("a run or an evaluation", "`next`"), rows)


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def filled(page: Path) -> str:
    """The page with every generated table as it should be."""
    text = page.read_text()
    for name, body in tables(page).items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, places = pattern.subn(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
        assert places, f"{page} has no place for the table {name}"
    return text


def wrapped() -> dict[str, str]:
    """The examples of objects with reset and step, by the package that they need."""
    pattern = r"<!-- wrapped: (\S+) -->\n```python\n(.*?)```"
    return dict(re.findall(pattern, ENVIRONMENTS.read_text(), re.DOTALL))


if __name__ == "__main__":
    for page in (ARCHITECTURE, REFERENCE, NEXT, FAULTS, SECURITY):
        page.write_text(filled(page))
