"""The hardware's size and clock: what scripts/hw-synth runs in the tools' Python.

    synth.py [--no-place] [WORD...]      a table; without words it is also written into docs/hardware-figures.md
    synth.py --where MODULE [N=V...]     where its cells go, and its longest path

Rows are each module alone with its defaults, one core, and the engine in the configurations below. A row that was made is kept in
target/hw/syn/rows until its sources, its parameters or the tools change.
"""

import argparse
import concurrent.futures
import json
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
# Cores and disks of the engines that are added up: all that is around the cores, and so many cores.
ENGINES = [(1, 1), (1, 4), (4, 4), (16, 4)]
# Without a row as modules: the package, what is below by itself, and what is only wires between modules that have rows. Of the generated
# functions, those that no core has in it are in docs/hardware-functions.md.
ELSEWHERE = ("millrace_pkg", "engine", "core", "commands")
# What stands for itself in a row of its own with other parameters than its defaults.
PARAMETERS = {"fifo": {"WIDTH": 64, "DEPTH": 16}, "skid": {"WIDTH": 64}}
SUMS = ("LUT", "PAIRED", "LUTRAM", "FF", "BRAM", "DSP")


def rows():
    """Name, top module, parameters, whether it is placed, and cores if it is an engine that is added up."""
    for file in flow.modules():
        if file.stem not in ELSEWHERE and (file.parent.name != "generated" or file.stem == "fn_chain"):
            parameters = PARAMETERS.get(file.stem, {})
            yield " ".join([file.stem, *(f"{name}={value}" for name, value in parameters.items())]), file.stem, parameters, True, 0
    yield "core", "core", {}, True, 0
    yield "core, 4 disks", "core", {"SSDS": 4}, False, 0
    yield "engine, 1 core, 1 disk, in one piece", "engine", {"CORES": 1, "SSDS": 1}, False, 0
    for cores, disks in ENGINES:
        plural = lambda number, what: f"{number} {what}{'s' * (number != 1)}"
        yield f"engine, {plural(cores, 'core')}, {plural(disks, 'disk')}", "engine", {"CORES": cores, "SSDS": disks}, False, cores


def folder(label):
    return re.sub(r"[^A-Za-z0-9]+", "-", label)


def kept(label, print_, make):
    """What `make` makes, or made when nothing was different."""
    file = flow.WORK / "rows" / f"{folder(label)}-{print_}.json"
    if file.exists():
        return json.loads(file.read_text())
    made = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    for old in file.parent.glob(f"{folder(label)}-{'?' * len(print_)}.json"):
        old.unlink()
    file.write_text(json.dumps(made))
    return made


def size(label, top, parameters, cores):
    if not cores:
        return kept(f"{label} size", flow.print_of(top, parameters), lambda: flow.resources(folder(label), top, parameters))
    around = kept(f"{label} around", flow.print_of(top, parameters), lambda: flow.resources(folder(label), top, parameters, box="core"))
    if around["boxes"] != cores:
        raise flow.Failed(f"{label}: {around['boxes']} cores in it, not {cores}")
    own = {"SSDS": parameters["SSDS"]} if parameters["SSDS"] > 1 else {}
    core = size("core" if not own else f"core, {own['SSDS']} disks", "core", own, 0)
    return {kind: around[kind] + cores * core[kind] for kind in SUMS}


def row(label, top, parameters, place, cores):
    """A line of the table, and whether it could be made."""
    start = time.monotonic()
    try:
        count = size(label, top, parameters, cores)
        clock = "–"
        if place:
            clock = f"{kept(f'{label} clock', flow.print_of(top, parameters), lambda: flow.clock(folder(label), top, parameters)[0]):.0f}"
    except flow.Failed as failure:
        print(f"hw-synth: {failure}", file=sys.stderr, flush=True)
        return f"| {label} | failed |", False
    print(f"hw-synth: {label}: {count['LUT']} LUT ({count['PAIRED']} paired), {count['FF']} FF, {count['BRAM']:g} BRAM, {clock} MHz ({time.monotonic() - start:.0f} s)",
          file=sys.stderr, flush=True)
    numbers = [f"{count[kind]:g}" if kind == "BRAM" else str(count[kind]) for kind in SUMS]
    return f"| {' | '.join([label, *numbers, clock])} |", True


def table(wanted, place):
    # What others are sums of comes first, and what takes longest.
    order = sorted(wanted, key=lambda what: (what[4] > 0, what[1] not in ("core", "engine")))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        whole = [what for what in order if not what[4]]
        made = dict(zip([what[0] for what in whole], pool.map(lambda what: row(*what[:3], what[3] and place, 0), whole)))
    for what in order:
        if what[4]:
            made[what[0]] = row(*what)
    head = ["| what | LUT | LUT, paired | of these memory | FF | BRAM36 | DSP | MHz, xc7z020 |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    lines = [made[what[0]] for what in wanted]
    return "\n".join(head + [line for line, _ in lines]) + "\n", all(good for _, good in lines)


def write(text):
    whole = FIGURES.read_text()
    before, _, rest = whole.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        raise SystemExit(f"hw-synth: {FIGURES} has lost its markers {BEGIN.strip()} and {END.strip()}")
    FIGURES.write_text(f"{before}{BEGIN}{text}{END}{after}")


def where(top, parameters, place):
    name = folder(f"where-{top}")
    whole = flow.resources(name, top, parameters)
    print(f"{top}: {whole['LUT']} LUT ({whole['PAIRED']} paired; {whole['LUTRAM']} memory), {whole['FF']} FF, {whole['BRAM']:g} BRAM, {whole['DSP']} DSP")
    for module, count in flow.hierarchy(name, top, parameters):
        print(f"  {module:60} {count['LUT']:6} LUT ({count['LUTRAM']} memory) {count['FF']:6} FF {count['BRAM']:4g} BRAM")
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
