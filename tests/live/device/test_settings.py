from hypothesis import given
from hypothesis import strategies as st

from foretrain.live.device.settings import RankSettings


@given(
    st.lists(st.text(), min_size=1).map(tuple),
    st.integers(1, 99),
    st.integers(1, 9),
    st.none() | st.integers(1),
    st.booleans(),
)
def test_settings_survive_the_way_to_another_process(
    script: tuple[str, ...], world: int, gpus: int, steps: int | None, module: bool
) -> None:
    settings = RankSettings(script, "H100", world, gpus, "/store", module=module, steps=steps, factor=1.25)
    assert RankSettings.from_json(settings.to_json()) == settings


@given(st.integers(1, 99), st.integers(1, 9))
def test_every_rank_has_its_own_seat_and_servers_are_filled_one_after_the_other(world: int, gpus: int) -> None:
    settings = RankSettings(("train.py",), "H100", world, gpus, "/store")
    told = [settings.environment(rank) for rank in range(world)]
    assert [int(one["RANK"]) for one in told] == list(range(world))
    seats = [(int(one["GROUP_RANK"]), int(one["LOCAL_RANK"])) for one in told]
    assert seats == sorted(set(seats))
    for one, (node, local) in zip(told, seats, strict=True):
        assert local < int(one["LOCAL_WORLD_SIZE"]) == sum(other == node for other, _ in seats)
        assert node < int(one["GROUP_WORLD_SIZE"]) == len({other for other, _ in seats})
        assert one["WORLD_SIZE"] == one["ROLE_WORLD_SIZE"] == str(world)
