"""Settings from the configuration: defaults that follow from other fields, and values that cannot work."""

from __future__ import annotations

import pytest

from gyre_hpc.config import ScheduleConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.records import CellId
from gyre_hpc.schedule.protocol import CellKind
from gyre_hpc.schedule.settings import LaunchOrder, PolicyName, Settings, settings_from, standalone_cells


def test_the_queue_and_the_staleness_limit_follow_from_phi_and_mu() -> None:
    config = ScheduleConfig(batch_groups=4, steps_per_burst=2, extra_dispatch=0.75)
    settings = settings_from(config, (11, 11))
    assert (settings.groups_ahead, settings.queue_groups, settings.staleness_limit) == (3, 11, 6)
    assert settings_from(ScheduleConfig(max_staleness=0), (1,)).staleness_limit == 0


def test_async_trains_on_half_of_the_cells_unless_told_otherwise() -> None:
    assert settings_from(ScheduleConfig(policy="async"), (1, 1, 1)).training_cells == 1
    assert settings_from(ScheduleConfig(policy="async", training_cells=3), (1,) * 4).training_cells == 3
    assert settings_from(ScheduleConfig(policy="gyre", training_cells=3), (1,) * 4).training_cells == 0
    assert settings_from(ScheduleConfig(policy="async"), (1, 1)).policy is PolicyName.ASYNC


def test_launch_order_and_overlap_come_from_the_configuration() -> None:
    assert settings_from(ScheduleConfig(), (1,)).launch_order is LaunchOrder.FIFO
    assert settings_from(ScheduleConfig(), (1,)).overlap_joins
    config = ScheduleConfig(launch_order="longest_first", overlap_joins=False)
    settings = settings_from(config, (1,))
    assert settings.launch_order is LaunchOrder.LONGEST_FIRST and not settings.overlap_joins


def test_the_standalone_pool_is_the_last_of_the_runs_own_cells_and_no_guest_is_of_it() -> None:
    settings = settings_from(ScheduleConfig(), (1,) * 4, standalone=2)
    kinds = [settings.kind_of(CellId(cell)) for cell in range(4)]
    assert kinds == [CellKind.OWN, CellKind.OWN, CellKind.STANDALONE, CellKind.STANDALONE]
    assert [cell for cell in range(8) if cell in standalone_cells(4, 2)] == [2, 3]


def test_settings_that_cannot_work_name_their_key() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.extra_dispatch"):
        settings_from(ScheduleConfig(batch_groups=4, extra_dispatch=0.3), (1,))
    with pytest.raises(ConfigError, match=r"schedule\.training_cells=2 of 2 cells, of which 1 must serve"):
        settings_from(ScheduleConfig(policy="async", training_cells=2), (1, 1))
    with pytest.raises(ConfigError, match="fix: "):
        Settings(capacities=())
