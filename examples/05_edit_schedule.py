"""A schedule as text: print what DDP sends, edit two lines, check the result, and run it."""

import foretrain as ft
from foretrain.schedule.script import Written

PLACE = "4x1xV100@10Gbps"
WORKLOAD = ft.workload.zoo("alexnet")


def milliseconds(text: str) -> float:
    """An iteration that sends exactly what ``text`` says, in its order, with no barrier."""
    return ft.simulate(WORKLOAD, PLACE, Written(text)).iteration_time / 1e9


def main() -> None:
    text = ft.simulate(WORKLOAD, PLACE, "ddp").script()
    print(text)
    print(f"in DDP's order              {milliseconds(text):.2f} ms")

    lines = text.splitlines()
    # The last bucket has the layers that the next forward pass needs first; it need not wait for 151 MB behind them.
    lines[-2], lines[-1] = lines[-1], lines[-2]
    swapped = milliseconds("\n".join(lines))
    print(f"the last two lines swapped  {swapped:.2f} ms")
    print(f"the optimum                 {ft.bound(WORKLOAD, PLACE).time / 1e9:.2f} ms")

    try:
        milliseconds("\n".join(lines[1:]))
    except ft.ForetrainError as error:
        print(f"and with a line missing: {error}")


if __name__ == "__main__":
    main()
