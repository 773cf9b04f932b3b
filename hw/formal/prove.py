"""Proves one file of hw/formal: all assertions in it and in the modules that it is made of, by induction over time.

    prove.py FILE

    module under proof ─┐
    FILE: environment ──┴─read_slang─► memories and asserts as logic ─► sat -tempinduct    holds from reset on, in every run, of any length
      (assume), assert  └─► sat, from reset                           ─► `reached` is reached, so the assumptions allow something

The file's module is named as the file, has `clk`, `rst` and an output `reached`: something that needs the interesting states. The
first step of a run has `rst`; later it comes as the solver likes. `// steps: N` in the file: the length of the induction, at most
(default 4); `// within: N`: of the run that reaches `reached` (default 12); `// with: SLOT_W=3 ...`: other sizes in the package,
because a solver's work grows with them; what is proved is proved for those.
"""

import re
import sys
import time
from pathlib import Path

HARDWARE = Path(__file__).resolve().parents[1]
sys.dont_write_bytecode = True
sys.path.insert(0, str(HARDWARE / "syn"))

import flow


def setting(text, name, default):
    found = re.search(rf"^// {name}: (\d+)", text, re.M)
    return int(found[1]) if found else default


def package(name, file, text):
    """The package with the sizes of the proof."""
    changed = file.read_text()
    for size in " ".join(re.findall(r"^// with: (.*)", text, re.M)).split():
        constant, value = size.split("=")
        changed, found = re.subn(rf"(\blocalparam int {constant}\s*=\s*)\w+", rf"\g<1>{value}", changed)
        if found != 1:
            sys.exit(f"hw: proof {name}: millrace_pkg.sv has no constant {constant}")
    folder = flow.WORK / f"proof-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file.name).write_text(changed)
    return folder / file.name


def main():
    file = Path(sys.argv[1]).resolve()
    name, text = file.stem, file.read_text()
    start = time.monotonic()
    stripped = re.sub(r"//.*", "", text)
    parts = {part.stem: part for part in flow.modules()}
    files = [package(name, parts["millrace_pkg"], text)]
    for part in parts:
        if part != "millrace_pkg" and flow.uses(stripped, part):
            files += [needed for needed in flow.needed(part) if needed not in files and needed != parts["millrace_pkg"]]
    # The front end defines SYNTHESIS, under which the modules leave their assertions out.
    read = [
        f"read_slang -U SYNTHESIS --top {name} {' '.join(map(str, files))} {file}", f"prep -top {name} -flatten",
        "memory_map", "async2sync", "chformal -lower", "opt_clean",
        f"tee -q -o {flow.WORK / f'proof-{name}' / 'stat.txt'} stat",
    ]
    run = "-seq 1 -set-at 1 rst 1 -set-assumes"
    steps, within = setting(text, "steps", 4), setting(text, "within", 12)
    try:
        log = flow.yosys(f"proof-{name}", [
            *read,
            f"sat -prove reached 0 {run} -tempinduct-baseonly -maxsteps {within} -falsify",
            f"sat -prove-asserts {run} -tempinduct -maxsteps {steps} -show-public -verify",
        ])
    except flow.Failed as failure:
        sys.exit(f"hw: proof {name}: it does not hold, needs another induction, or reaches nothing.\n{failure}")
    asserts = re.search(r"^\s*(\d+)\s+\$assert$", (flow.WORK / f"proof-{name}" / "stat.txt").read_text(), re.M)
    length = re.findall(r"^\[induction step (\d+)\]", log, re.M)
    if not asserts or not length or "Induction step proven: SUCCESS!" not in log:
        sys.exit(f"hw: proof {name}: nothing was proved")
    print(f"hw: proof {name}: {asserts[1]} assertions hold, by induction over {length[-1]} steps ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
