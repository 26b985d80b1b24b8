"""What a plan of a fleet may say, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from chiasm.settings import SettingsError
from router.ray_plan import Plan, Pool, read

GOOD = """
address: 127.0.0.1:6379
pools:
- {role: encoder, least: 0, most: 2, resources: {encoder: 1}, flags: {model: digits}}
- {role: decoder, flags: {model: digits}}
"""


def test_a_plan_is_read_with_what_it_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    path.write_text(GOOD, encoding="utf-8")
    plan = read(path)
    assert plan.auth == "token" and plan.where() == "127.0.0.1:6379"
    assert [(pool.role, pool.least, pool.most, pool.model) for pool in plan.pools] == [
        ("encoder", 0, 2, "digits"),
        ("decoder", 1, 1, "digits"),
    ]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("pools: [", "not YAML"),
        (GOOD.replace("least: 0", "least: 3"), "least is 3, and most 2"),
        (GOOD.replace("decoder, ", "decoder, least: 0, "), "decoders do not rest"),
        (GOOD.replace("{model: digits}}\n-", "{model: digits, arena: /x}}\n-"), "the actor chooses that"),
        (GOOD.replace("role: decoder", "role: encoder"), "same role and model"),
        (GOOD + "port: 1\n", "port"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, written: str, said: str) -> None:
    path = tmp_path / "plan"
    path.write_text(written, encoding="utf-8")
    with pytest.raises(SettingsError, match=said):
        read(path)


def test_a_pool_stays_the_same_kind_when_its_settings_change_and_its_workers_do_not() -> None:
    before = Pool(role="encoder", flags={"model": "digits"})
    after = Pool(role="encoder", most=4, flags={"model": "digits", "max-units": "4"})
    more = Pool(role="encoder", most=4, flags={"model": "digits"})
    assert before.kind == after.kind and before.print != after.print
    assert before.print == more.print, "how many there are changes nobody"
    assert before.kind != Pool(role="encoder", flags={"model": "digits", "name": "other"}).kind


def test_an_address_may_come_later_in_a_file(tmp_path: Path) -> None:
    plan = Plan(address=str(tmp_path / "address"), pools=(Pool(role="encoder", flags={"model": "digits"}),))
    assert plan.where() is None
    (tmp_path / "address").write_text("10.0.0.1:6379\n", encoding="ascii")
    assert plan.where() == "10.0.0.1:6379"
