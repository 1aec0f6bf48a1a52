"""Run the property tests with new seeds, again and again, for a given time: ``make fuzz SECONDS=300``.

Every seed is printed; ``pytest -m hypothesis --hypothesis-profile=fuzz --hypothesis-seed=SEED`` draws the same again.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time


def main(seconds: float, workers: str) -> int:
    """Return 0 if no property failed within ``seconds``, else pytest's exit status."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        seed = secrets.randbelow(1 << 32)
        print(f"seed {seed}, {left:.0f} s left", flush=True)
        command = [sys.executable, "-m", "pytest", "-m", "hypothesis and not (ranks or device or lab or process)"]
        command += ["--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", "--maxfail=1", "-n", workers]
        with subprocess.Popen(command) as process:
            try:
                status = process.wait(left)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait()
                return 0
        if status:
            print(f"seed {seed} has failed")
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2]))
