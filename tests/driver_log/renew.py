"""Records the kept logs anew, on the fake driver: python -m tests.driver_log.renew."""

from pathlib import Path

from bench.driver_log.steps import recorded
from bench.gpu.tools import DEVICE
from bench.gpu.variants import CAPTURES
from tests.device_oracle.oracle import gpus

HEADER = "# Recorded from the fake driver, not from a GPU, by python -m tests.driver_log.renew\n"
FOLDER = Path(__file__).parent / "logs/fake"


def main() -> None:
    for name, capture in CAPTURES.items():
        with gpus(1) as fake:
            log = recorded(fake.library._name, DEVICE, capture)
        (FOLDER / f"{name}.log").write_text(HEADER + log)


if __name__ == "__main__":
    main()
