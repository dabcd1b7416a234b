"""Numbers of launches and incarnations, read back."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.launch.incarnations import (
    INCARNATIONS_PER_LAUNCH,
    LAUNCHES_PER_EPOCH,
    command,
    epoch_of,
    launch_number,
    number_of,
)
from gyre_hpc.transport.messages import PeerKind


@given(
    epoch=st.integers(1, 1000),
    launches=st.integers(0, LAUNCHES_PER_EPOCH - 1),
    worker=st.integers(0, INCARNATIONS_PER_LAUNCH - 1),
)
def test_an_incarnation_tells_its_launch_and_the_epoch_of_its_controller(
    epoch: int, launches: int, worker: int
) -> None:
    number = launch_number(epoch, launches)
    incarnation = int(command(PeerKind.GATEWAY, Path("run"), number)[-1]) + worker
    assert number_of(incarnation) == number
    assert epoch_of(incarnation) == epoch
