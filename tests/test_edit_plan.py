"""Action lists: what is taken, what is refused and how it is named, and the one text of each."""

import json

import pytest

from data.edit_plan import EditPlan, parse_plan

GOOD = [
    {"action": "replace", "target": "狗", "bbox": [0, 140, 500, 860], "object": "a cat"},
    {"action": "add_text", "content": "限时折扣", "position": "bottom right", "style": "red"},
]


def test_the_text_of_a_plan_is_one_and_reads_back():
    plan = EditPlan.from_json(GOOD)
    text = (
        '[{"action":"replace","target":"狗","bbox":[0,140,500,860],"object":"a cat"},'
        '{"action":"add_text","content":"限时折扣","style":"red","position":"bottom right"}]'
    )
    assert plan.to_text() == text and parse_plan(text) == plan
    shuffled = [dict(reversed(action.items())) | {"style": action.get("style")} for action in GOOD]
    assert EditPlan.from_json(shuffled).to_text() == text
    assert parse_plan(json.dumps(GOOD, indent=2)) == plan


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "must be a list, got dict"),
        ([], "the list: .* at least 1 item"),
        (["remove"], "action 1, the whole: .*, got 'remove'"),
        ([GOOD[0], {"target": "x"}], "action 2, action: Field required"),
        ([{"action": "delete"}], "action 1, action: Input should be 'remove', 'insert'.*, got 'delete'"),
        ([{"action": "remove", "colour": "red"}], "action 1, colour: Extra inputs are not permitted"),
        ([{"action": "remove", "target": ""}], "action 1, target: .* at least 1 character"),
        ([{"action": "remove", "target": 3}], "action 1, target: .*valid string, got '3'"),
        ([{"action": "remove", "bbox": [0, 0, 10]}], "action 1, bbox"),
        ([{"action": "remove", "bbox": [10, 0, 10, 10]}], r"needs 0 <= x1 < x2 <= 1000 .*, got \[10, 0, 10, 10\]"),
        ([{"action": "remove", "bbox": [0, 0, 10, 1001]}], r"y2 <= 1000, got \[0, 0, 10, 1001\]"),
        ([{"action": "remove", "bbox": [-1, 0, 10, 10]}], "needs 0 <= x1"),
        ([{"action": "remove", "bbox": [0, 0, 10.5, 10]}], "action 1, bbox"),
        ([{"action": "remove", "target": 3}, {"action": "delete"}], "more"),
    ],
)
def test_faults_are_named(value, message):
    with pytest.raises(ValueError, match=message):
        EditPlan.from_json(value)


@pytest.mark.parametrize("text", ["", "remove the dog", '[{"action":"remove"', "[" * 100_000])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError, match="the plan is no JSON"):
        parse_plan(text)


def test_where_everything_stays_is_known_only_if_every_action_is_boxed_in():
    boxed = [GOOD[0], {"action": "insert", "object": "sun", "bbox": [500, 0, 1000, 400]}]
    assert EditPlan.from_json(boxed).changed_boxes() == [(0, 140, 500, 860), (500, 0, 1000, 400)]
    for loose in (GOOD[1], {"action": "background", "style": "red", "bbox": [0, 0, 9, 9]}):
        assert EditPlan.from_json([*boxed, loose]).changed_boxes() is None
    moved = {"action": "move", "target": "sun", "bbox": [500, 0, 1000, 400], "position": "left"}
    assert EditPlan.from_json([moved]).changed_boxes() is None  # where it comes to is not in the box
