"""A tree is drawn from its leaves, and grows as far as its budgets and no further."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BudgetError, InvalidRequest
from forkd.limits import TTL_S_MAX, TTL_S_MIN
from forkd.model.network import HOST
from forkd.model.sandbox import BranchOptions, ForkOptions, Sandbox, SandboxState
from forkd.model.tree import TreeBudgets, TreeNode, count_live, descendants, grow
from tests.support.sandboxes import a_sandbox

if TYPE_CHECKING:
    from forkd.model.ids import SandboxId

MIB = 1 << 20


def sandbox(*ancestors: Sandbox) -> Sandbox:
    return a_sandbox(*(each.id for each in ancestors))


def shape(node: TreeNode) -> tuple[SandboxId, list[object]]:
    return node.id, [shape(child) for child in node.children]


def test_a_fork_is_the_root_of_a_tree_of_its_own() -> None:
    one, other = sandbox(), sandbox()

    assert [shape(node) for node in grow([one, other], {})] == [(one.id, []), (other.id, [])]
    assert (one.parent, one.root) == (None, one.id)


def test_branches_of_branches_are_below_whom_they_were_branched_from() -> None:
    root = sandbox()
    left, right = sandbox(root), sandbox(root)
    leaf = sandbox(root, left)

    (tree,) = grow([root, left, right, leaf], {leaf.id: 5})

    assert shape(tree) == (root.id, [(left.id, [(leaf.id, [])]), (right.id, [])])
    assert tree.children[0].children[0].private_bytes == 5
    assert (leaf.parent, leaf.root) == (left.id, root.id)


def test_ancestors_that_are_gone_keep_their_places() -> None:
    root, middle = sandbox(), sandbox()
    leaf, twin = sandbox(root, middle), sandbox(root, middle)

    (tree,) = grow([leaf, twin], {})

    assert shape(tree) == (root.id, [(middle.id, [(leaf.id, []), (twin.id, [])])])
    assert (tree.sandbox, tree.children[0].sandbox) == (None, None)


def test_descendants_are_found_at_any_distance_and_the_ended_do_not_count_as_live() -> None:
    root, stranger = sandbox(), sandbox()
    child = sandbox(root)
    ended = replace(sandbox(root, child), state=SandboxState.EXITED)
    all_ = [root, stranger, child, ended]

    assert descendants(root.id, all_) == (child, ended)
    assert count_live(root.id, all_) == 1


def test_a_tree_takes_as_many_live_descendants_as_its_budget_and_not_one_more() -> None:
    budgets = TreeBudgets(live_max=10)

    budgets.check_growth(sandbox(), count=4, live=6)
    with pytest.raises(BudgetError, match="more than 10") as caught:
        budgets.check_growth(sandbox(), count=5, live=6)
    assert caught.value.context["budget"] == "live"


def test_a_tree_is_as_deep_as_its_budget_and_not_one_deeper() -> None:
    budgets = TreeBudgets(depth_max=2)
    root = sandbox()
    child = sandbox(root)

    budgets.check_growth(child, count=1, live=1)
    with pytest.raises(BudgetError, match="at most 2") as caught:
        budgets.check_growth(sandbox(root, child), count=1, live=2)
    assert caught.value.context["budget"] == "depth"


def test_a_tree_that_holds_its_budget_of_memory_grows_no_more() -> None:
    budgets = TreeBudgets(private_mib_max=8)

    budgets.check_private(sandbox(), 8 * MIB - 1)
    with pytest.raises(BudgetError, match="holds 8 MiB") as caught:
        budgets.check_private(sandbox(), 8 * MIB)
    assert caught.value.context["budget"] == "private_memory"


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="live_max"):
        TreeBudgets(live_max=0)


def test_siblings_are_forked_under_the_limits_of_their_source() -> None:
    source = replace(
        sandbox(),
        network=HOST,
        memory_limit_mib=512,
        cpu_limit=0.5,
        cpu_weight=50,
        pids_limit=32,
        io_limit_mib_s=20,
        io_limit_ops=500,
        bandwidth_limit_mbit=10,
    )

    options = BranchOptions(ttl_s=60.0).of(source)

    assert options == ForkOptions(
        network=HOST,
        memory_limit_mib=512,
        cpu_limit=0.5,
        cpu_weight=50,
        pids_limit=32,
        io_limit_mib_s=20,
        io_limit_ops=500,
        bandwidth_limit_mbit=10,
        ttl_s=60.0,
    )


@pytest.mark.parametrize("ttl_s", [TTL_S_MIN / 2, TTL_S_MAX + 1, float("nan")])
def test_a_life_out_of_range_is_refused(ttl_s: float) -> None:
    for options in (ForkOptions, BranchOptions):
        with pytest.raises(InvalidRequest, match="ttl_s"):
            options(ttl_s=ttl_s)
