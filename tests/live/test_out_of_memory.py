import json

import pytest

from foretrain.live.event_log import MEMORY, STREAM
from foretrain.live.failures import OutOfMemory, check_memory
from tests.live.player import play

SAID = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 80.00 GiB of which more is said."


def failing(failure):
    def program(rank):
        rank.run(1, 10)
        rank.step(1, rank.record(1))
        yield rank.ask(STREAM, stream=1)
        breakdown = {"parameters": 3 << 30, "gradients": 0, "activations": 70 << 30}
        told = {"allocated": 73 << 30, "reserved": 75 << 30, "retries": 1, "breakdown": breakdown}
        rank.note(MEMORY, payload=json.dumps({**told, "out_of_memory": failure}).encode())
        yield rank.frame()

    return program


def test_who_wanted_what_and_where_the_rest_went():
    trace = play(failing(None), failing(SAID), failing(SAID)).trace
    with pytest.raises(
        OutOfMemory, match=r"rank 1 ran out of memory in step 2, as did rank 2: .* 1\.50 GiB when"
    ) as error:
        check_memory(trace)
    assert error.value.ranks == (1, 2)
    assert error.value.tried == "1.50 GiB"
    assert "75.00 GiB were reserved" in str(error.value)
    assert "70.00 GiB for activations, 3.00 GiB for parameters." in str(error.value)


def test_a_rank_that_had_enough_is_not_blamed():
    check_memory(play(failing(None)).trace)
    check_memory(play(failing(None), kept=1).trace)
