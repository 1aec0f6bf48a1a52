"""Every schedule on one workload: its time, its distance to the optimum, and whether it is worth it."""

import foretrain as ft


def main() -> None:
    workload = ft.workload.zoo("bert_base", batch=32, device="V100")
    table = ft.compare(workload, "4x1xV100@10Gbps")

    print(f"{workload.name}, {len(workload.gradients)} gradients, {workload.size / 1e6:.0f} MB, on {table.cluster}")
    print(f"{'schedule':<20}{'ms':>8}{'speed-up':>10}{'gap':>8}   knobs found")
    for run in sorted(table.runs, key=lambda run: run.iteration_time):
        milliseconds = run.iteration_time / 1e9
        print(f"{run.schedule.name:<20}{milliseconds:>8.1f}{table.speedup(run):>9.2f}×{run.gap:>8.1%}   {run.schedule}")
    print(table.bound)
    print(table.advice.text)


if __name__ == "__main__":
    main()
