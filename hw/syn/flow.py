"""Synthesis of one module, place and route of one module: what hw/syn/synth.py makes its table of.

    hw/rtl ──read_slang──► synth_xilinx -family xcup ──► stat            LUT, FF, BRAM, DSP on UltraScale+
                     └───► in a ring of registers (below) ──► synth_xilinx -family xc7 ──► nextpnr, xc7z020 ──► MHz

A module has more ports than a chip has pins. For the clock it is put into a ring: its inputs come from a shift register, its
outputs go to registers of their own, from there through a chain of XORs to one pin. So every path is from register to register,
as between neighbours that register their boundaries, and nothing can be optimised away.

Everything runs in target/hw/syn/<name>; the log of every tool stays there.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import count as counting

REPO = Path(__file__).resolve().parents[2]
RTL = REPO / "hw" / "rtl"
TARGET = Path(os.environ.get("MILLRACE_TARGET_DIR", REPO / "target"))
WORK = TARGET / "hw" / "syn"
HW_ROOT = TARGET / "hw-root"
CHIP = HW_ROOT / "usr/share/nextpnr/himbaechel/xilinx/chipdb-xc7z020.bin"
DEVICE = "xc7z020clg484-1"
# Three pins of that package, for the ring.
PINS = {"clk": "Y9", "ring_in": "F22", "ring_out": "T22"}


class Failed(Exception):
    pass


def modules():
    """Every file of the hardware, the package and other packages first."""
    files = sorted(RTL.glob("**/*.sv"))
    return sorted(files, key=lambda file: not file.stem.endswith("_pkg"))


def uses(text, module):
    """Has the text an instance of the module, or an import of the package?"""
    pattern = rf"\b{module}::" if module.endswith("_pkg") else rf"^\s*{module}\s*(#\s*\(|\w+\s*\()"
    return re.search(pattern, text, re.M)


def needed(top):
    """The files that a top needs: those of the modules that its files have instances of."""
    have = {file.stem: file for file in modules()}
    found, waiting = set(), [top]
    while waiting:
        name = waiting.pop()
        found.add(name)
        text = re.sub(r"//.*", "", have[name].read_text())
        waiting += [other for other in have if other not in found and uses(text, other)]
    return [file for file in modules() if file.stem in found or file.stem == "millrace_pkg"]


def yosys(name, script):
    """Runs Yosys' commands in a process of their own, since its library ends the process on an error. Returns the log."""
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    program = "import sys, pyosys.libyosys as y\nd = y.Design()\nfor line in sys.stdin.read().splitlines(): y.run_pass(line, d)\n"
    done = subprocess.run([sys.executable, "-c", program], input="\n".join(script), capture_output=True, text=True)
    log = folder / "yosys.log"
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Failed(f"{name}: Yosys failed; {log} ends in:\n" + "\n".join(lines[-12:]))
    return log.read_text()


def read(top, parameters, extra=(), options=""):
    generics = " ".join(f"-G {name}={value}" for name, value in parameters.items())
    files = " ".join(map(str, [*needed(top), *extra]))
    return f"read_slang -D SYNTHESIS {options} {generics} --top {'ring' if extra else top} {files}"


def resources(name, top, parameters, box=None):
    """What synthesis for UltraScale+ makes of it, as count.counts, and PAIRED: LUTs when pairs count once. A module that is a box is left
    out, and `boxes` says how often it is there."""
    stat, netlist = WORK / name / "stat.json", WORK / name / "netlist.json"
    stat.unlink(missing_ok=True)
    boxed, bare = "", []
    if box:
        # A box has no parameters for Yosys; what its instances say of them is of no use here.
        found = re.findall(r"^\s*parameter\b[^=]*?(\w+)\s*=", (RTL / f"{box}.sv").read_text(), re.M)
        boxed, bare = f"--blackboxed-module {box}", [f"setparam {' '.join(f'-unset {name}' for name in found)} t:{box}"]
    yosys(name, [
        read(top, parameters, options=boxed), *bare, f"synth_xilinx -family xcup -flatten -noiopad -noclkbuf -top {top}",
        f"tee -q -o {stat} stat -tech xilinx -json", f"write_json -noscopeinfo {netlist}",
    ])
    if not stat.exists():
        raise Failed(f"{name}: synthesis ended without its statistics")
    count = counting.counts(json.loads(stat.read_text())["design"]["num_cells_by_type"])
    whole = json.loads(netlist.read_text())["modules"][top]["cells"]
    count["PAIRED"] = count["LUT"] - counting.pairs(whole)
    boxes = {kind: number for kind, number in count["other"].items() if box and kind.lstrip("\\").split("$")[0] == box}
    count["other"] = {kind: number for kind, number in count["other"].items() if kind not in boxes}
    count["boxes"] = sum(boxes.values())
    if count["other"]:
        raise Failed(f"{name}: cells that nobody counts: {count['other']}")
    return count


def hierarchy(name, top, parameters):
    """The counts of each module of it by itself, nothing flattened: what one of them is to another is not optimised."""
    stat = WORK / name / "stat.json"
    stat.unlink(missing_ok=True)
    yosys(name, [read(top, parameters, options="--keep-hierarchy"), f"synth_xilinx -family xcup -noiopad -noclkbuf -top {top}", f"tee -q -o {stat} stat -tech xilinx -json"])
    if not stat.exists():
        raise Failed(f"{name}: synthesis ended without its statistics")
    for module, what in json.loads(stat.read_text())["modules"].items():
        yield module.lstrip("\\"), counting.counts({cell: number for cell, number in what["num_cells_by_type"].items() if not cell.startswith("\\")})


def ports(name, top, parameters):
    """Direction and width of each port, from Yosys."""
    out = WORK / name / "ports.json"
    yosys(name, [read(top, parameters), f"write_json -noscopeinfo {out}"])
    for module, what in json.loads(out.read_text())["modules"].items():
        if module == top or what["attributes"].get("top"):
            return {port: (value["direction"], len(value["bits"])) for port, value in what["ports"].items()}
    raise Failed(f"{name}: {top} has no ports")


def seen(file):
    """What synthesis sees of a source: no comments, and nothing that is there for simulation only."""
    text = re.sub(r"^`ifndef SYNTHESIS$.*?^`endif$", "", file.read_text(), flags=re.M | re.S)
    return re.sub(r"\s+", " ", re.sub(r"//.*", "", text))


def print_of(top, *what):
    """A digest of what a result depends on: the sources that the top needs, the tools, and what the caller adds."""
    digest = hashlib.sha256(repr((top, what)).encode())
    digest.update("".join(f"{file.name} {seen(file)}\0" for file in needed(top)).encode())
    for file in [Path(__file__), Path(counting.__file__), REPO / "hw" / "requirements.txt", HW_ROOT / ".complete", HW_ROOT / "packages"]:
        if file.is_file():
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def ring(name, top, parameters):
    """The ring around a module, as a file."""
    found = ports(name, top, parameters)
    lines = [".clk(clk)"] if found.pop("clk", None) else []
    inputs = {port: width for port, (direction, width) in found.items() if direction == "input"}
    outputs = {port: width for port, (direction, width) in found.items() if direction == "output"}
    given, taken = sum(inputs.values()), sum(outputs.values())
    at = 0
    for port, width in inputs.items():
        lines.append(f".{port}(given[{at}+:{width}])")
        at += width
    at = 0
    for port, width in outputs.items():
        lines.append(f".{port}(taken[{at}+:{width}])")
        at += width
    generics = ", ".join(f".{name}({value})" for name, value in parameters.items())
    file = WORK / name / "ring.sv"
    file.write_text(f"""module ring (input logic clk, input logic ring_in, output logic ring_out);
    logic [{given - 1}:0] given;
    logic [{taken - 1}:0] taken, held, chain;
    always_ff @(posedge clk) begin
        given <= {{given[{given - 2}:0], ring_in}};
        held  <= taken;
        chain <= {{chain[{taken - 2}:0], 1'b0}} ^ held;
        ring_out <= chain[{taken - 1}];
    end
    {top} #({generics}) module_under_test ({", ".join(lines)});
endmodule
""")
    return file


def clock(name, top, parameters, wanted=125, seeds=(1,)):
    """The best clock of the seeds in MHz, after place and route on xc7z020, and the critical path of it."""
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    netlist, pins = folder / "ring.json", folder / "ring.xdc"
    file = ring(name, top, parameters)
    yosys(name + "/xc7", [read(top, {}, [file]), "synth_xilinx -family xc7 -flatten -nosrl -top ring", f"write_json {netlist}"])
    pins.write_text("".join(
        f"set_property PACKAGE_PIN {pin} [get_ports {port}]\nset_property IOSTANDARD LVCMOS33 [get_ports {port}]\n" for port, pin in PINS.items()))
    best = None
    for seed in seeds:
        report, log = folder / f"report-{seed}.json", folder / f"nextpnr-{seed}.log"
        report.unlink(missing_ok=True)
        command = [REPO / "scripts/in-root", "nextpnr-himbaechel-xilinx", "--device", DEVICE, "--chipdb", CHIP, "--json", netlist,
                   "-o", f"xdc={pins}", "--freq", str(wanted), "--timing-allow-fail", "--seed", str(seed), "--report", report, "--log", log, "--quiet"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, "MILLRACE_GUEST_ROOT": str(HW_ROOT), "PYTHONHOME": str(HW_ROOT / "usr")})
        if done.returncode or not report.exists():
            raise Failed(f"{name}: nextpnr failed; {log} ends in:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-12:]))
        found = json.loads(report.read_text())
        reached = min(clock["achieved"] for clock in found["fmax"].values())
        if best is None or reached > best[0]:
            best = (reached, found)
    return best
