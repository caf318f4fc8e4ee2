"""The page that a run leaves behind: how to make one, the machine, and the tables of all stages."""

from collections.abc import Mapping
from pathlib import Path

from gpu_stages.steps import RowsFile, Settings, Stage, failed, messages

HOW, FINDINGS = (Path(__file__).with_name(name) for name in ("how.md", "findings.md"))
DRY = "**A dry run without a GPU: it shows that every stage runs, and nothing about speed.**\n"


def page(stages: Mapping[str, Stage], file: RowsFile, facts: Mapping[str, str], settings: Settings) -> str:
    """The whole page, in Markdown; that of a GPU with what earlier runs have shown."""
    dry = settings.small or settings.device.type != "cuda"
    parts = [HOW.read_text(), DRY if dry else FINDINGS.read_text()]
    parts.append("## Machine\n")
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n")
    for name, stage in stages.items():
        rows = file.of(name)
        good = {key: row for key, row in rows.items() if "error" not in row}
        left = sum(step.key not in rows for step in stage.steps(settings))
        state = "" if not left else f"**{left} of {left + len(rows)} rows are not measured yet.**\n\n"
        parts.append(f"## `{name}`: {stage.TITLE}\n\n{stage.ABOUT}\n\n{state}{stage.tables(good) if rows else ''}\n")
        for title, lines in (("Failed", failed(rows)), ("The package's own messages", messages(rows))):
            parts += [f"{title}:\n", "\n".join(lines) + "\n"] if lines else []
    return "\n".join(part.rstrip() + "\n" for part in parts)
