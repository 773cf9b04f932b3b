"""How many cycles a command takes: 4 KiB reads through one core in steady state, by the latency of host memory; and the cores that disks need.

    rate.py            measures (about a minute), prints the table and writes it into docs/hardware-figures.md
    rate.py --print    only prints

The simulated engine of one core and one disk (hw/rtl/engine.sv), guests whose queues are never empty, a host that answers each read after
exactly so many cycles, each completion with its interrupt, nobody ever pausing. The disk answers at once: its time is not the core's.
"""

import json
import math
import os
import re
import sys
from pathlib import Path

HARDWARE = Path(__file__).resolve().parent
sys.path[:0] = [str(HARDWARE / "tb"), str(HARDWARE / "tb" / "engine")]

LATENCIES = (25, 50, 100, 150, 200, 250)
IN_FLIGHT = 63  # of a core on one disk: its ring's entries but one
DISKS = (550_000, 2_500_000)
FIGURES = HARDWARE.parent / "docs" / "hardware-figures.md"
BEGIN, END = "<!-- made by hw/rate.py: begin -->\n", "<!-- made by hw/rate.py: end -->\n"

if "COCOTB_TEST_MODULES" in os.environ:
    import cocotb
    from steady import cycles_a_command

    @cocotb.test()
    @cocotb.parametrize(latency=LATENCIES, functions=[False, True])
    async def rate(dut, latency, functions):
        took = await cycles_a_command(dut, latency, functions)
        with open(os.environ["MILLRACE_RATES"], "a") as file:
            file.write(json.dumps([latency, functions, took]) + "\n")


def measure():
    import harness

    results = harness.TARGET / "rates.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("")
    os.environ.update(MILLRACE_RATES=str(results), MILLRACE_SEED=os.environ.get("MILLRACE_SEED", "1"), MILLRACE_QUICK="0")
    harness.run("engine", parameters={"PAGES": 16})
    return {(latency, functions): cycles for latency, functions, cycles in map(json.loads, results.read_text().splitlines())}


def clock(text):
    """MHz of a core, as the table of sizes and clocks says it; None: it was not placed."""
    tables = [[part.strip() for part in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    header = next((cells for cells in tables if any(cell.startswith("MHz,") for cell in cells)), None)
    row = next((cells for cells in tables if cells[1] == "core"), None)
    if not header or not row or len(row) != len(header):
        return None
    cell = row[next(at for at, name in enumerate(header) if name.startswith("MHz,"))]
    found = re.search(r"\d+(\.\d+)?", cell)
    return float(found[0]) if found else None


def table(rates, mhz):
    lines = ["| host memory answers after | " + " | ".join(f"{latency} cycles" for latency in LATENCIES) + " |", "| --- |" + " ---: |" * len(LATENCIES)]
    for functions, name in ((False, "cycles a command, functions off"), (True, "cycles a command, share, throttle and replicate on")):
        lines.append(f"| {name} | " + " | ".join(f"{rates[latency, functions]:.2f}" for latency in LATENCIES) + " |")
    worst = max(rates.values())
    source = "measured above" if mhz else "the least it is to have"
    mhz = mhz or 125.0
    lines += ["", f"At {mhz:.0f} MHz ({source}) and {worst:.2f} cycles, the most above, a core does {mhz / worst:.1f} million commands a second.", "",
              "| a disk of | cores by cycles | one core suffices while the disk answers within |", "| --- | ---: | ---: |"]
    for disk in DISKS:
        lines.append(f"| {disk / 1e6:g} M commands/s | {math.ceil(disk * worst / (mhz * 1e6))} | {IN_FLIGHT / disk * 1e6:.0f} µs |")
    lines += ["", f"The last column is what a core's {IN_FLIGHT} commands in flight on a disk allow (rate × time): a disk that is slower under such load needs as many more cores."]
    return "\n".join(lines) + "\n"


def main():
    text = FIGURES.read_text()
    made = table(measure(), clock(text))
    print(made, end="")
    if "--print" not in sys.argv[1:]:
        begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        FIGURES.write_text(text[:begin] + made + text[end:])


if __name__ == "__main__":
    main()
