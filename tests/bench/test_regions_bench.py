"""The region bench times real pulls between two processes, and says of a way that cannot run why."""

from __future__ import annotations

import pytest

from gyre_hpc.bench import regions


async def test_every_way_that_runs_has_a_figure_and_every_other_a_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = await regions.measure(1 << 20, rounds=2)
    missing = [name for name in regions.WAYS if f"{name}_over_memcpy" not in found]
    assert {"shm_over_memcpy", "tcp_over_memcpy", "publish_over_memcpy"} <= set(found)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{name}_over_memcpy" for name in missing
    ]


def test_a_figure_is_the_median_of_the_rounds_own_ratios() -> None:
    seconds = {"shm": [2.0, 4.0, 40.0], "memcpy": [1.0, 1.0, 10.0]}
    figure = regions.figures(seconds, 1 << 20)["shm_over_memcpy"]
    assert (figure.value, figure.aim, figure.better) == (0.25, 0.4, "higher")
