"""The hardware's size and clock: what scripts/hw-synth runs in the tools' Python.

    synth.py [--no-place] [WORD...]      a table; without words it is also written into docs/hardware-figures.md
    synth.py --where MODULE [N=V...]     where its cells go, and its longest path

Rows are each module alone with its defaults, one core, and the engine in the configurations below.
"""

import argparse
import concurrent.futures
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

import flow

FIGURES = flow.REPO / "docs" / "hardware-figures.md"
BEGIN, END = "<!-- made by make hw-synth: begin -->\n", "<!-- made by make hw-synth: end -->\n"
# Name of the row, top module, parameters, whether placed: xc7z020 has 53,200 LUTs.
ENGINES = [
    ("engine, 1 core, 1 disk", "engine", {"CORES": 1, "SSDS": 1}, True),
    ("engine, 1 core, 4 disks", "engine", {"CORES": 1, "SSDS": 4}, True),
    ("engine, 4 cores, 4 disks", "engine", {"CORES": 4, "SSDS": 4}, True),
    ("engine, 16 cores, 4 disks", "engine", {"CORES": 16, "SSDS": 4}, False),
]
# What stands for itself in a row of its own with other parameters than its defaults.
PARAMETERS = {"fifo": {"WIDTH": 64, "DEPTH": 16}, "skid": {"WIDTH": 64}}


def rows():
    for file in flow.modules():
        if file.stem not in ("millrace_pkg", "engine"):
            parameters = PARAMETERS.get(file.stem, {})
            yield " ".join([file.stem, *(f"{name}={value}" for name, value in parameters.items())]), file.stem, parameters, True
    if (flow.RTL / "engine.sv").exists():
        yield from ENGINES


def folder(label):
    return re.sub(r"[^A-Za-z0-9]+", "-", label)


def row(label, top, parameters, place):
    """A line of the table, and whether it could be made."""
    start = time.monotonic()
    try:
        count, _ = flow.resources(folder(label), top, parameters)
        if count["other"]:
            raise flow.Failed(f"{label}: cells that nobody counts: {count['other']}")
        clock = f"{flow.clock(folder(label), top, parameters)[0]:.0f}" if place else "–"
    except flow.Failed as failure:
        print(f"hw-synth: {failure}", file=sys.stderr, flush=True)
        return f"| {label} | failed |", False
    print(f"hw-synth: {label}: {count['LUT']} LUT, {count['FF']} FF, {count['BRAM']:g} BRAM, {clock} MHz ({time.monotonic() - start:.0f} s)",
          file=sys.stderr, flush=True)
    return f"| {label} | {count['LUT']} | {count['LUTRAM']} | {count['FF']} | {count['BRAM']:g} | {count['DSP']} | {clock} |", True


def table(wanted, place):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(lambda what: row(*what[:3], what[3] and place), wanted))
    head = ["| what | LUT | of these memory | FF | BRAM36 | DSP | MHz, xc7z020 |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    return "\n".join(head + [line for line, _ in made]) + "\n", all(good for _, good in made)


def write(text):
    whole = FIGURES.read_text()
    before, _, rest = whole.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        raise SystemExit(f"hw-synth: {FIGURES} has lost its markers {BEGIN.strip()} and {END.strip()}")
    FIGURES.write_text(f"{before}{BEGIN}{text}{END}{after}")


def where(top, parameters, place):
    name = folder(f"where-{top}")
    whole, _ = flow.resources(name, top, parameters)
    print(f"{top}: {whole['LUT']} LUT ({whole['LUTRAM']} memory), {whole['FF']} FF, {whole['BRAM']:g} BRAM {whole['other'] or ''}")
    _, stat = flow.resources(name, top, parameters, flatten=False)
    for module, what in stat["modules"].items():
        cells = what["num_cells_by_type"]
        count = flow.counts({cell: number for cell, number in cells.items() if not cell.startswith("\\")})
        inside = ", ".join(f"{cell}" for cell in count["other"])
        print(f"  {module.lstrip(chr(92)):60} {count['LUT']:6} LUT ({count['LUTRAM']} memory) {count['FF']:6} FF {count['BRAM']:4g} BRAM  {inside}")
    if not place:
        return
    reached, report = flow.clock(name, top, parameters)
    print(f"{reached:.1f} MHz on xc7z020; the longest path:")
    longest = max(report["critical_paths"], key=lambda path: sum(part["delay"] for part in path["path"]) if path["from"] == path["to"] else 0)
    for part in longest["path"]:
        ends = f"{part['from']['cell']}.{part['from']['port']} -> {part['to']['cell']}.{part['to']['port']}"
        print(f"  {part['delay']:6.2f} ns {part['type']:9} {ends} {part.get('net', '')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-place", action="store_true")
    parser.add_argument("--where", metavar="MODULE")
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    if arguments.where:
        where(arguments.where, dict(word.split("=") for word in arguments.words), not arguments.no_place)
        return 0
    wanted = [what for what in rows() if not arguments.words or any(word in what[0] for word in arguments.words)]
    if not wanted:
        sys.exit(f"hw-synth: nothing is called {' or '.join(arguments.words)}")
    text, good = table(wanted, not arguments.no_place)
    print(text)
    if good and not arguments.words and not arguments.no_place:
        write(text)
    return int(not good)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except flow.Failed as failure:
        sys.exit(f"hw-synth: {failure}")
