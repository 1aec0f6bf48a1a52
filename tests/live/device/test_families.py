from foretrain.live.device.process_groups import _Families


def numbered(*groups: list[int]) -> list[int]:
    """The family of each of ``groups``, made one after the other."""
    told: list[int] = []

    def announce(ranks: list[int], family: int) -> int:
        told.append(family)
        return len(told)

    families = _Families(announce)
    for group in groups:
        families.add(group)
    return told


def test_groups_made_in_one_go_are_a_family() -> None:
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    assert numbered([0, 1, 2, 3], *rows, *columns) == [1, 2, 2, 3, 3]


def test_another_size_or_a_rank_seen_before_begins_another_family() -> None:
    assert numbered([0], [1], [2, 3]) == [1, 1, 2]
    assert numbered([0, 1], [0, 1]) == [1, 2]
