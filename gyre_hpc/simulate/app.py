"""`gyre simulate`: composes the call, runs its study and shows it as a table, or with --json as one JSON line.

JSON: `{"ladder": {ROW: {mean, low, high}}}`, `{"paper_2p4t": {"async" | "colocate": {mean, low, high}}}`,
`{"beyond": {WORLD: {ratio, low, high, gap_bb, gap_wc, staleness}}, "beyond_x075": {...}}`,
`{"baselines": {WORLD: {ROW: {ratio, ...}}}}`, or for a design of one's own `{"design": {...}}`. Ratios are times over E0's (or over gyre's with 4 cells) in the same random worlds; intervals are 95 %;
gaps are time over the bound minus 1, null where the bound does not hold.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
from rich.console import Console

from gyre_hpc.config_keys import reference
from gyre_hpc.schedule.settings import LaunchOrder, PolicyName
from gyre_hpc.simulate import app_tables
from gyre_hpc.simulate.baselines import OURS, baselines
from gyre_hpc.simulate.beyond import Comparison, beyond
from gyre_hpc.simulate.choose import choose
from gyre_hpc.simulate.designs import Design
from gyre_hpc.simulate.ladder import BASE, PAPER, fixed_pools, ladder
from gyre_hpc.simulate.measure import Measured, Window, measure
from gyre_hpc.simulate.presets import VERB, SimulateConfig, compose, compose_world, preset_names, world_names

Shown = dict[str, object]
"""Ready for JSON."""


def main(arguments: list[str], console: Console) -> None:
    """The verb. Raises ConfigError and MissingInput."""
    if any(argument in ("--help", "-h") for argument in arguments):
        sys.stdout.write(help_text())
        return
    overrides = [word for word in arguments if word != "--json"]
    config = compose(overrides)
    tables = console if len(overrides) == len(arguments) else None
    found = _STUDIES[config.study](config, overrides, tables)
    if tables is None:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


def _ladder(config: SimulateConfig, overrides: list[str], tables: Console | None) -> Shown:
    rows = ladder(config)
    if tables:
        app_tables.ladder(rows, tables)
    _draw(rows, BASE, config, tables, paper=PAPER, scaled=("A3", "C0", "E0"))
    return {"ladder": {name: row.ratio_to(rows[BASE])._asdict() for name, row in rows.items()}}


def _fixed_pools(config: SimulateConfig, overrides: list[str], tables: Console | None) -> Shown:
    rows = fixed_pools(config)
    if tables:
        app_tables.designs(rows, "gyre", tables)
    _draw(rows, "gyre", config, tables)
    others = (name for name in rows if name != "gyre")
    return {"paper_2p4t": {name: rows[name].ratio_to(rows["gyre"])._asdict() for name in others}}


def _beyond(config: SimulateConfig, overrides: list[str], tables: Console | None) -> Shown:
    found: list[Comparison] = []
    for comparison in beyond(config, overrides):
        found.append(comparison)
        shown = {"E0": comparison.base, "A": comparison.bundle}
        _draw_world(comparison.world, shown, "E0", config, overrides, tables)
        if tables:
            tables.print(f"{comparison.world} measured", style="dim")
    if tables:
        app_tables.beyond(found, tables)
    return {
        "beyond": {each.world: _beside(each.bundle, each.base) for each in found},
        "beyond_x075": {each.world: _beside(each.less_training, each.base) for each in found},
    }


def _baselines(config: SimulateConfig, overrides: list[str], tables: Console | None) -> Shown:
    found: Shown = {}
    for world, rows in baselines(config, overrides):
        found[world] = {name: _beside(row, rows[OURS]) for name, row in rows.items()}
        _draw_world(world, rows, OURS, config, overrides, tables)
        if tables:
            app_tables.designs(rows, OURS, tables, title=world)
    return {"baselines": found}


def _beside(mine: Measured, base: Measured) -> dict[str, object]:
    ratio = mine.ratio_to(base)
    return {
        "ratio": ratio.mean,
        "low": ratio.low,
        "high": ratio.high,
        "gap_bb": mine.gap_bb,
        "gap_wc": mine.gap_wc,
        "staleness": mine.staleness,
    }


def _design(config: SimulateConfig, overrides: list[str], tables: Console | None) -> Shown:
    window, seeds = Window(config.warm_up, config.steps), range(config.seeds)
    mine = measure(own_design(config, window), config.world, window, seeds)
    base = choose(Design(PolicyName.GYRE, cells=8), config.world, window, config.staleness)
    rows = {"yours": mine, "gyre, 8 cells": measure(base, config.world, window, seeds)}
    if tables:
        app_tables.designs(rows, "gyre, 8 cells", tables)
    _draw(rows, "gyre, 8 cells", config, tables)
    shown = _beside(mine, rows["gyre, 8 cells"])
    shown |= asdict(mine.design) | {"hours_per_step": mine.hours.mean, "idle": mine.idle}
    return {"design": shown}


def _draw(
    rows: Mapping[str, Measured],
    base: str,
    config: SimulateConfig,
    tables: Console | None,
    paper: Mapping[str, float] | None = None,
    scaled: tuple[str, ...] = (),
) -> None:
    """Pictures into the folder asked for, if one was."""
    if not config.pictures:
        return
    from gyre_hpc.simulate.illustrate import illustrate

    folder, title = Path(config.pictures), _TITLES[config.study]
    paths = illustrate(rows, base, config.world, folder, title=title, paper=paper, scaled=scaled)
    if tables:
        tables.print(f"pictures: {paths[-1]}", soft_wrap=True)


def _draw_world(
    world: str,
    rows: Mapping[str, Measured],
    base: str,
    config: SimulateConfig,
    overrides: list[str],
    tables: Console | None,
) -> None:
    """Pictures in a folder of the world's name."""
    if config.pictures:
        folder = str(Path(config.pictures, world))
        there = replace(config, pictures=folder, world=compose_world(list(overrides), world))
        _draw(rows, base, there, tables)


def own_design(config: SimulateConfig, window: Window) -> Design:
    """The design that the call describes, its open choices made."""
    policy = PolicyName(config.schedule)
    design = Design(
        policy=policy,
        cells=config.cells if policy is PolicyName.GYRE else 1,
        pool_nodes=config.pool_nodes,
        training_nodes=config.training_nodes,
        streaming=config.streaming,
        launch_order=LaunchOrder(config.launch_order),
        overlap_joins=config.overlap_joins,
    )
    if config.steps_per_burst:
        bursts = range(config.steps_per_burst, config.steps_per_burst + 1)
        return choose(design, config.world, window, config.staleness, bursts=bursts)
    return choose(design, config.world, window, config.staleness)


_TITLES = {
    "ladder": "The paper's ladder",
    "fixed_pools": "Fixed pools and elastic cells",
    "beyond": "Beyond the paper: bundle A",
    "baselines": "Gyre and its baselines",
    "design": "A design",
}
_STUDIES = {
    "ladder": _ladder,
    "fixed_pools": _fixed_pools,
    "beyond": _beyond,
    "baselines": _baselines,
    "design": _design,
}


def help_text() -> str:
    """What `gyre simulate --help` prints."""
    lines = [
        f"{VERB}: the schedule of a run, unchanged, in a simulated machine.",
        "",
        f"  {VERB} preset=paper_ladder                 the paper's ablation",
        f"  {VERB} preset=beyond --json seeds=16       one JSON line",
        f"  {VERB} world=P1 schedule=gyre cells=16     a design of your own against 8 cells",
        f"  {VERB} trace=FILE.csv schedule=async       on durations of your own",
        f"  {VERB} --from RUN schedule.policy=colocate on a recorded run, with other settings",
        "",
        f"  preset: {', '.join(preset_names())}",
        f"  world: {', '.join(world_names())}",
        "",
        "Keys (default; a preset or world may set another):",
    ]
    lines += [f"  {key} = {default}\n      {meaning}" for key, default, meaning in reference(SimulateConfig)]
    return "\n".join(lines) + "\n"
