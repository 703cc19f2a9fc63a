"""What runs and deployments have cost, and the budget that a run may use: hours of work, and a
price of an hour of one GPU, or of a machine without any.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from environments.settings import CostSettings, load_settings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import LOCAL_TARGET, RunSpec
from flash_mcp.state.runs import COUNTED
from flash_mcp.state.store import Store
from flash_mcp.state.targets import FILE, find_target

DAY_S = 86_400.0


def price_of_hour(home: Path, target: str = LOCAL_TARGET) -> CostSettings:
    """The operator's price on that target; none if settings.toml or targets.toml cannot be used,
    which doctor and `flash-mcp target list` report.
    """
    try:
        settings = load_settings(home).cost
        if target == LOCAL_TARGET:
            return settings
        return replace(settings, price_per_hour=find_target(home, target).price_per_hour or 0.0)
    except (ValueError, FlashError):
        return CostSettings()


def cost(run: Run, home: Path) -> str | None:
    return cost_of({run.target: run.used_s * run.spec.gpus}, home)


def cost_of(used_s: Mapping[str, float], home: Path) -> str | None:
    """What so many seconds of one GPU on each target cost; None if none of them has a price."""
    prices = {target: price_of_hour(home, target) for target in used_s}
    if not any(price.price_per_hour for price in prices.values()):
        return None
    total = sum(used_s[target] / 3600 * price.price_per_hour for target, price in prices.items())
    return f"{total:.2f} {price_of_hour(home).currency}".strip()


def spent(used_s: Mapping[str, float], home: Path) -> str | None:
    """Such as "0.60 h, 1.20 EUR", for so many seconds of one GPU on each target."""
    if not (total_s := sum(used_s.values())):
        return None
    hours, price = f"{total_s / 3600:.2f} h", cost_of(used_s, home)
    if price:
        return f"{hours}, {price}"
    return hours


def over_limit(store: Store) -> set[str]:
    """Owners whose runs and deployments of the last 24 hours have cost what the operator allows in
    a day. Their next ones wait, or are refused. Of each that was under way in this time at most 24
    hours count.
    """
    limit = price_of_hour(store.base).owner_per_day
    if not limit:
        return set()
    sql = f"""SELECT owner, target, sum(min(used_s, ?1) * gpus) AS seconds
             FROM main.runs WHERE {COUNTED} AND (ended IS NULL OR ended > ?2)
             GROUP BY owner, target"""
    spent: dict[str, float] = {}
    for row in store.query(sql, [DAY_S, time.time() - DAY_S]):
        price = price_of_hour(store.base, row["target"]).price_per_hour
        spent[row["owner"]] = spent.get(row["owner"], 0.0) + row["seconds"] / 3600 * price
    return {owner for owner, cost in spent.items() if cost >= limit}


def limit_error(store: Store, owner: str) -> FlashError | None:
    if owner not in over_limit(store):
        return None
    price = price_of_hour(store.base)
    limit = f"{price.owner_per_day:g} {price.currency}".strip()
    what = f"what {owner} runs and serves has cost {limit} within 24 hours, and more waits"
    fix = "wait; the operator may raise owner_per_day of [cost] in settings.toml"
    return FlashError("quota_exceeded", what, fix=fix)


def check(spec: RunSpec, home: Path) -> None:
    """FlashError(invalid_argument) for max_cost on a machine without a price."""
    if spec.max_cost is not None and not price_of_hour(home, spec.target).price_per_hour:
        what = "max_cost needs the price of an hour, which this server does not know"
        where = "under [cost] in settings.toml"
        if spec.target != LOCAL_TARGET:
            where = f"of {spec.target} in {FILE}"
        fix = f"use max_hours; the operator sets price_per_hour {where}"
        raise FlashError("invalid_argument", what, max_cost=spec.max_cost, fix=fix)


def used_up(run: Run, home: Path) -> str | None:
    """The budget that the run has used up since it was started or resumed, in words."""
    if not isinstance(run.spec, RunSpec):
        return None
    hours = (run.used_s - run.used_before_s) / 3600
    if run.spec.max_hours is not None and hours >= run.spec.max_hours:
        return f"max_hours={run.spec.max_hours:g} is used up"
    if run.spec.max_cost is None:
        return None
    price = price_of_hour(home, run.target)
    per_hour = price.price_per_hour * run.spec.gpus
    if not per_hour or hours * per_hour < run.spec.max_cost:
        return None
    return f"max_cost={run.spec.max_cost:g} is used up, at {per_hour:g} an hour"
