"""Synthesis of one module, place and route of one module: what hw/syn/synth.py makes its table of.

    hw/rtl ──read_slang──► synth_xilinx -family xcup ──► stat            LUT, FF, BRAM, DSP on UltraScale+
                     └───► in a ring of registers (below) ──► synth_xilinx -family xc7 ──► nextpnr, xc7z020 ──► MHz

A module has more ports than a chip has pins. For the clock it is put into a ring: its inputs come from a shift register, its
outputs go to registers of their own, from there through a chain of XORs to one pin. So every path is from register to register,
as between neighbours that register their boundaries, and nothing can be optimised away.

Everything runs in target/hw/syn/<name>; the log of every tool stays there.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
RTL = REPO / "hw" / "rtl"
TARGET = Path(os.environ.get("MILLRACE_TARGET_DIR", REPO / "target"))
WORK = TARGET / "hw" / "syn"
HW_ROOT = TARGET / "hw-root"
CHIP = HW_ROOT / "usr/share/nextpnr/himbaechel/xilinx/chipdb-xc7z020.bin"
DEVICE = "xc7z020clg484-1"
# Three pins of that package, for the ring.
PINS = {"clk": "Y9", "ring_in": "F22", "ring_out": "T22"}

# LUTs that a memory of LUTs takes, by Yosys' cell: of each bit of width, for every read and write port, as in the device's manual.
LUTRAM = {
    "RAM16X1S": 1, "RAM16X1D": 2, "RAM32X1S": 1, "RAM32X1D": 2, "RAM64X1S": 1, "RAM64X1D": 2, "RAM128X1S": 2, "RAM128X1D": 4,
    "RAM256X1S": 4, "RAM256X1D": 8, "RAM512X1S": 8, "RAM32M": 4, "RAM64M": 4, "RAM32M16": 8, "RAM64M8": 8,
    "RAM32X16DR8": 8, "RAM64X8SW": 8, "SRL16": 1, "SRL16E": 1, "SRLC16": 1, "SRLC16E": 1, "SRLC32E": 1,
}
# Wiring inside a slice or beside the fabric: no LUT of its own.
FREE = re.compile(r"MUXF[789]|CARRY[48]|BUFG.*|IBUF|OBUF|GND|VCC|\$scopeinfo")


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


def resources(name, top, parameters, flatten=True):
    """What synthesis for UltraScale+ makes of it: counts by kind, and cells by type."""
    stat = WORK / name / "stat.json"
    stat.unlink(missing_ok=True)
    flat, keep = ("-flatten", "") if flatten else ("", "--keep-hierarchy")
    yosys(name, [read(top, parameters, options=keep), f"synth_xilinx -family xcup {flat} -noiopad -noclkbuf -top {top}", f"tee -q -o {stat} stat -tech xilinx -json"])
    if not stat.exists():
        raise Failed(f"{name}: synthesis ended without its statistics")
    found = json.loads(stat.read_text())
    return counts(found["design"]["num_cells_by_type"]), found


def counts(cells):
    count = {"LUT": 0, "LUTRAM": 0, "FF": 0, "BRAM": 0.0, "DSP": 0, "other": {}}
    for cell, number in cells.items():
        if re.fullmatch(r"LUT[1-6](_2)?|INV", cell):
            count["LUT"] += number
        elif cell in LUTRAM:
            count["LUT"] += LUTRAM[cell] * number
            count["LUTRAM"] += LUTRAM[cell] * number
        elif re.fullmatch(r"(FD|LD)[A-Z]+(_1)?", cell):
            count["FF"] += number
        elif cell.startswith("RAMB36"):
            count["BRAM"] += number
        elif cell.startswith("RAMB18"):
            count["BRAM"] += number / 2
        elif cell.startswith("DSP48"):
            count["DSP"] += number
        elif not FREE.fullmatch(cell):
            count["other"][cell] = number
    return count


def ports(name, top, parameters):
    """Direction and width of each port, from Yosys."""
    out = WORK / name / "ports.json"
    yosys(name, [read(top, parameters), f"write_json -noscopeinfo {out}"])
    for module, what in json.loads(out.read_text())["modules"].items():
        if module == top or what["attributes"].get("top"):
            return {port: (value["direction"], len(value["bits"])) for port, value in what["ports"].items()}
    raise Failed(f"{name}: {top} has no ports")


def ring(name, top, parameters):
    """The ring around a module, as a file."""
    found = {port: what for port, what in ports(name, top, parameters).items() if port != "clk"}
    inputs = {port: width for port, (direction, width) in found.items() if direction == "input"}
    outputs = {port: width for port, (direction, width) in found.items() if direction == "output"}
    given, taken = sum(inputs.values()), sum(outputs.values())
    lines, at = [".clk(clk)"], 0
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
