"""Transfers over the links of a box: each boundary has the link between its two devices."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pykern import schedules
from pykern.boxes import Box, BoxDevice, BoxHost, BoxLink, load, over_links, save, slowest
from pykern.cli import app
from pykern.plan import Costs, save_plan, simulate, with_replicas

DEVICE = BoxDevice("a GPU", 8e9, None, None, None, None)
FAST, SLOW = BoxLink(((0, 1), (2, 3)), 100.0, 1_000.0), BoxLink(((1, 2),), 10.0, 5_000.0)
# A chain: nothing joins its ends.
BOX = Box(3, "a chain", "measured", (), (DEVICE,) * 4, (FAST, SLOW), BoxHost(None, None))
TIMES = Costs(7_000, 14_000)


def test_a_microbatch_takes_as_long_as_its_links() -> None:
    plan = schedules.forward_only(4, 1)
    costs = over_links(TIMES, plan, BOX, 1e6)
    fast, slow = 1_000 + 1e6 / 100, 5_000 + 1e6 / 10
    assert simulate(plan, costs).makespan_ns == 4 * 7_000 + 2 * fast + slow


def test_the_least_latency_does_not_hold_a_link() -> None:
    plan = schedules.forward_only(2, 3)
    costs = over_links(Costs(1, 2), plan, BOX, 1e6)
    # One message behind the other, the last one on its way at the end.
    assert simulate(plan, costs).makespan_ns == 1 + 3 * 1e4 + 1_000 + 1


def test_sizes_may_differ_by_boundary() -> None:
    costs = over_links(TIMES, schedules.gpipe(3, 2), BOX, [1e6, 2e6, 0])
    assert (costs.transfer_ns, costs.bandwidth, costs.shared_links) == (1_000, 1, True)
    assert costs.message_bytes == [1e4, 4_000 + 2e5, 0]
    assert (costs.forward_ns, costs.backward_ns) == (7_000, 14_000)


def test_nothing_crosses_within_a_device() -> None:
    assert over_links(TIMES, schedules.zb_v(2, 4), BOX, 1e6).message_bytes == [1e4, 0, 1e4, 0]
    alone = over_links(replace_transfer(TIMES), schedules.gpipe(1, 2), BOX, 1e6)
    assert (alone.transfer_ns, alone.message_bytes) == (0, [0])


def replace_transfer(costs: Costs) -> Costs:
    return Costs(costs.forward_ns, costs.backward_ns, 99.0)


def test_a_boundary_of_replicas_has_their_slowest_link() -> None:
    plan = with_replicas(schedules.gpipe(2, 2), 2)
    assert over_links(TIMES, plan, BOX, 1e6).message_bytes == [1e4, 0]
    crossed = replace(BOX, links=(BoxLink(((0, 1),), 100.0, 1_000.0), BoxLink(((2, 3),), 1.0, 1e3)))
    assert over_links(TIMES, plan, crossed, 1e6).message_bytes == [1e6, 0]


def test_what_the_box_lacks_is_refused() -> None:
    with pytest.raises(
        ValueError, match="devices must be at most 4, as many as the box has, got 5"
    ):
        over_links(TIMES, schedules.gpipe(5, 2), BOX, 1e6)
    with pytest.raises(ValueError, match="the box must tell its link between 3 and 0"):
        over_links(TIMES, schedules.interleaved(4, 4), BOX, 1e6)
    with pytest.raises(
        ValueError, match="message_bytes must be one for all, or a list with one for each of 4 s"
    ):
        over_links(TIMES, schedules.gpipe(4, 2), BOX, [1.0])
    with pytest.raises(ValueError, match="the box must tell its link between 0 and 2"):
        slowest(BOX)


def test_the_slowest_link_is_the_worst_in_both_figures() -> None:
    links = (BoxLink(((0, 1),), 100.0, 9_000.0), BoxLink(((0, 1, 2),), 10.0, 5_000.0))
    mixed = replace(BOX, devices=(DEVICE,) * 3, links=links)
    assert slowest(mixed) == BoxLink(((0, 1, 2),), 10.0, 9_000.0)
    assert slowest(replace(BOX, devices=(DEVICE,), links=())) is None


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def test_the_command_takes_transfers_from_a_box() -> None:
    told = plan("one_f_one_b", "--box", "a100x4", "--message", "64", "--costs", "1:2")
    assert told.exit_code == 0, told.output
    box, one = load("a100x4"), schedules.one_f_one_b(4, 8)
    found = simulate(one, over_links(Costs(1e6, 2e6), one, box, 64 * 2**20))
    assert f"{found.makespan_ns / 1e6:.1f}" in told.stdout
    each = box.links[0].latency_ns + 64 * 2**20 / box.links[0].bytes_per_ns
    line = f"a microbatch's 64 MiB take {each / 1e6:.3g} ms over the links of {box.name} "
    assert f"{line}(published, not measured)" in told.stdout


def test_slices_of_a_microbatch_are_smaller_messages() -> None:
    whole = plan("gpipe", "--box", "a100x4", "--message", "64").stdout
    sliced = plan("seq1f1b", "--slices", "4", "--box", "a100x4", "--message", "256").stdout
    taken = [re.findall(r"MiB take (\S+) ms", text) for text in (whole, sliced)]
    assert taken[0] == taken[1] != []


def test_a_search_knows_the_slowest_link(tmp_path: Path) -> None:
    save(replace(BOX, links=(BoxLink(((0, 1, 2, 3),), 100.0, 1_000.0),)), tmp_path / "box.json")
    told = plan("auto", "-m", "4", "--box", str(tmp_path / "box.json"), "--message", "200")
    assert told.exit_code == 0, told.output
    # Two milliseconds for each of three boundaries, there and back, beside 3 ms in each device.
    bound = re.search(r"lower bound (\S+) ms", told.stdout)
    assert bound is not None
    assert float(bound[1]) > 12 + 3


def test_a_file_keeps_its_costs_on_a_box(tmp_path: Path) -> None:
    one = schedules.gpipe(2, 2)
    save_plan(one, tmp_path / "plan.json", costs=Costs([3e6, 5e6], 1e6))
    told = plan(str(tmp_path / "plan.json"), "--box", "rtx3090x2", "--message", "1")
    assert told.exit_code == 0, told.output
    found = simulate(one, over_links(Costs([3e6, 5e6], 1e6), one, load("rtx3090x2"), 2**20))
    assert f"{found.makespan_ns / 1e6:.1f}" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--box", "a100x4"], "--box and --message must be given together, got --box alone"),
        (["--message", "1"], "--box and --message must be given together, got --message alone"),
        (["--box", "a100x4", "--message", "1", "--transfer", "0.1"], "--transfer must not go with"),
        (["--box", "a100x4", "--message", "1", "-p", "8"], "devices must be at most 4"),
        (["--box", "a100x5", "--message", "1"], "Did you mean 'a100x4'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], message: str) -> None:
    refused = plan("gpipe", *arguments)
    assert refused.exit_code == 2
    assert message in " ".join(refused.stderr.split())
