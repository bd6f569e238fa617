from dataclasses import replace

from tools.demo import OWN, Answer, complaints

ZEROS = [0.0] * 5


def answer(index: int) -> Answer:
    text = f"{index:032x}"
    return Answer(index, ZEROS, f"sb-{index}", text, text, index / 7, index / 9, text, text)


def disk(index: int) -> dict[str, str]:
    return {str(index): f"child {index} was here"}


def test_children_that_differ_in_everything_pass() -> None:
    assert complaints([answer(0), answer(1)], [disk(0), disk(1)]) == []


def test_each_way_of_being_the_same_is_found() -> None:
    one, other = answer(0), answer(1)
    for name in OWN:
        twin = replace(other, **{name: getattr(one, name)})
        found = complaints([one, twin], [disk(0), disk(twin.index)])
        assert found == [f"2 children have only 1 different {name}"]


def test_a_wrong_result_is_found() -> None:
    wrong = replace(answer(0), zeros=[0.0])
    assert complaints([wrong], [disk(0)]) == ["child 0 computed [0.0], not five zeros"]


def test_a_siblings_file_on_the_disk_is_found() -> None:
    shared = disk(0) | disk(1)
    assert complaints([answer(0)], [shared]) == [f"child 0 found on its disk: {shared}"]


def test_a_file_that_is_missing_is_found() -> None:
    assert complaints([answer(0)], [{}]) == ["child 0 found on its disk: {}"]
