"""Makes the fuzz corpus from request bodies that harnesses sent: `python tools/harness_bodies.py FOLDER OUT.json`.

FOLDER holds one JSON file per request: {"path": below the base URL, "body": text}. What is written keeps the shape of each body
(keys, types, roles, handles, short words) and none of its prose: long texts become filler of at most 24 characters, lists of
tools are cut. So the corpus holds no vendor's texts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEPT_CHARS, FILLED_CHARS = 24, 24
KEPT_TOOLS = KEPT_PROPERTIES = 1
"""Of each type."""
HANDLE = re.compile(r"(toolu|call|msg|rs|fc|ctc|keep)[_:]e\d+a\d+c\d+")
FILLER = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor "


def scrubbed(value: Any, key: str = "") -> Any:
    """The value without prose."""
    if isinstance(value, dict):
        kept = list(value.items())[: KEPT_PROPERTIES if key == "properties" else None]
        return {name: scrubbed(item, name) for name, item in kept if not _private(name)}
    if isinstance(value, list):
        return [scrubbed(item, key) for item in (_chosen(value) if key in ("tools", "enum") else value)]
    if isinstance(value, str):
        return _text(value)
    return value


def _chosen(items: list[Any]) -> Iterator[Any]:
    seen: dict[str, int] = {}
    for item in items:
        kind = item.get("type", "") if isinstance(item, dict) else ""
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= KEPT_TOOLS:
            yield item


def _private(name: str) -> bool:
    return name in ("user_id", "client_metadata", "prompt_cache_key", "$schema")


def _text(text: str) -> str:
    if len(text) <= KEPT_CHARS or HANDLE.fullmatch(text.rsplit("_", 1)[0]) or text.startswith("call:"):
        return text
    if text.startswith("{"):
        try:
            return json.dumps(scrubbed(json.loads(text)))
        except ValueError:
            pass
    mark = "x-anthropic-billing-header: " if text.startswith("x-anthropic-billing-header") else ""
    return mark + (FILLER * 2)[: min(len(text), FILLED_CHARS)]


def main(folder: Path, out: Path) -> None:
    """Write the corpus."""
    items = []
    for file in sorted(folder.glob("*.json")):
        sent = json.loads(file.read_text())
        path = sent["path"].split("?")[0]
        if not sent["body"] or not path.endswith(("messages", "completions", "responses", "count_tokens")):
            continue
        items.append(
            {"harness": file.stem.rsplit("-", 1)[0], "path": path, "body": scrubbed(json.loads(sent["body"]))}
        )
    out.write_text(json.dumps(items, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
