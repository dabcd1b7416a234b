"""Write docs/config.md from the typed schema: python tools/make_config_reference.py [--check]."""

from __future__ import annotations

import sys
from pathlib import Path

from gyre_hpc.config import RunConfig
from gyre_hpc.config_keys import reference

TARGET = Path(__file__).resolve().parent.parent / "docs" / "config.md"


def page() -> str:
    """The whole page."""
    rows = "\n".join(
        f"| `{key}` | `{default}` | {meaning} |" for key, default, meaning in reference(RunConfig)
    )
    return (
        "# Configuration reference\n\nGenerated from `gyre_hpc/config*.py` by `tools/make_config_reference.py`. Defaults are the"
        " schema's; a choice of a group or an experiment may set another value.\n\n"
        f"| key | default | meaning |\n|---|---|---|\n{rows}\n"
    )


def main() -> int:
    if "--check" in sys.argv:
        current = TARGET.read_text() == page()
        if not current:
            print(f"{TARGET} is out of date; run: python tools/make_config_reference.py")
        return not current
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
