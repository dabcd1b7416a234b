"""The agent of the end-to-end tests: a stdlib program that knows a base URL and writes a score into its workspace.

Called as `agent.py PLAN BASE_URL WORKSPACE SEED`. The seed of an execution is its id when the run's seed is 0, so the
plan (a folder with `plan.json`) can name executions: which make no call, hang at the end, leave a broken score, wait
for the file PLAN/release (or PLAN/release-SEED) before their first call, or ask for more tokens in it than in the others.
Everything is asked again until it is answered, as real harnesses do.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PAUSE_S = 0.1


def ask(base_url: str, messages: list[dict[str, str]], max_tokens: int) -> str:
    """The answer's text. An identical request follows each connection that broke; a refusal ends the program."""
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": max_tokens}).encode()
    while True:
        request = urllib.request.Request(
            f"{base_url}/v1/chat/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"] or "")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise SystemExit(f"refused: {error.read().decode()}") from error
        except (OSError, ValueError):
            pass
        time.sleep(PAUSE_S)


def main() -> int:
    folder, base_url, workspace, seed = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    plan = json.loads((folder / "plan.json").read_text())
    if seed in plan["silent"]:
        return 0
    releases = (folder / "release", folder / f"release-{seed}")
    while seed in plan["hold"] and not any(path.exists() for path in releases):
        time.sleep(PAUSE_S)
    messages = [{"role": "user", "content": (workspace / "task").read_text()}]
    for number in range(plan["calls"]):
        most = plan["max_tokens"] if number else plan["first"].get(str(seed), plan["max_tokens"])
        text = ask(base_url, messages, most)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    score = "broken" if seed in plan["broken"] else str(seed % 2)
    (workspace / "score").write_text(score + "\n")
    while seed in plan["hang"]:
        time.sleep(PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
