"""The site's node health check before a cell: silent when it passes, its last words when it does not."""

from __future__ import annotations

import pytest

from gyre_hpc.errors import NodeUnfit
from gyre_hpc.launch.nodes import health
from gyre_hpc.launch.nodes.health import check_node


def test_a_node_that_passes_or_is_not_asked_is_fit() -> None:
    check_node([])
    check_node(["true"])


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (["sh", "-c", "echo /scratch is full >&2; exit 3"], "/scratch is full"),
        (["sh", "-c", "exit 3"], "exit code 3"),
        (["/no/such/probe"], "No such file"),
        (["sleep", "60"], "no end within"),
    ],
)
def test_a_node_that_fails_is_named_with_the_probes_last_words(
    probe: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(health, "PROBE_S", 2.0)
    with pytest.raises(NodeUnfit, match=words) as refused:
        check_node(probe)
    assert refused.value.message.startswith("n7: ") and refused.value.exit_code == 8
