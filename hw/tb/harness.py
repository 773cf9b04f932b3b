"""Builds one module of hw/rtl with Verilator and runs its cocotb tests: the one way of building for all module tests.

    hw/rtl/<module>.sv ──verilator──► target/hw/tb/<module>/<configuration>/ ──► results.xml
    hw/tb/<module>/test_<module>.py ──cocotb──────────────┘

A test file ends in

    def test_fifo():                                   # pytest finds it
        harness.run("fifo", parameters={"DEPTH": 16})

    if __name__ == "__main__":                         # and it runs alone
        test_fifo()

Settings from the environment:
    MILLRACE_SEED      the seed of everything random (printed; the default is a new one each time)
    MILLRACE_TEST      run only tests whose name matches this regular expression
    MILLRACE_WAVES=1   write dump.vcd beside the results
    MILLRACE_QUICK=1   only the first configuration of a module: what `make test` runs
    MILLRACE_COVERAGE=1  count lines and toggles into coverage.dat beside the results (hw/coverage.py adds them up)
"""

import hashlib
import inspect
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

HARDWARE = Path(__file__).resolve().parents[1]
RTL = HARDWARE / "rtl"
TARGET = Path(os.environ.get("MILLRACE_TARGET_DIR", HARDWARE.parent / "target")) / "hw" / "tb"

# Where modules are found that nobody names.
LIBRARY = ["-y", str(RTL), "-y", str(RTL / "generated"), "+libext+.sv"]

# The wheel's verilated.mk was configured on another machine: these are what configure would have found here.
MAKE_SETTINGS = {
    "CFG_CXXFLAGS_PCH_I": "-include",
    "CFG_CXXFLAGS_COROUTINES": "-fcoroutines",
    "CFG_LDLIBS_THREADS": "-pthread -latomic",
    "AR": "ar",
    "CXX": "g++",
    "LINK": "g++",
    "PYTHON3": sys.executable,
    "PERL": "perl",
}

_built = set()


def run(module, tests=None, sources=(), parameters=None, defines=None):
    """Lints and builds `module`, of hw/rtl or one that lies beside its test, and runs its tests; raises SystemExit with the reason if
    anything is wrong.

    tests       Python modules with the cocotb tests; the caller's own file if not given
    sources     other modules that it is made of: names in hw/rtl without ending, or paths
    parameters  of the top module
    """
    if os.environ.get("MILLRACE_QUICK") == "1" and not _first(module):
        return
    parameters = parameters or {}
    caller = Path(inspect.stack()[1].filename).resolve()
    tests = tests or caller.stem
    if str(caller.parent) not in sys.path:
        sys.path.insert(0, str(caller.parent))
    label = " ".join([module, *(f"{name}={value}" for name, value in parameters.items())])
    files = [RTL / "millrace_pkg.sv", *map(_file, sources), beside if (beside := caller.parent / f"{module}.sv").exists() else _file(module)]
    verilator = _verilator()
    defines = defines or {}
    lint(module, files, parameters, defines)

    seed = int(os.environ.get("MILLRACE_SEED") or random.SystemRandom().getrandbits(31))
    coverage = os.environ.get("MILLRACE_COVERAGE") == "1"
    waves = os.environ.get("MILLRACE_WAVES") == "1"
    build = TARGET / module / _configuration(label, coverage, waves)
    print(f"hw: {label}: MILLRACE_SEED={seed}", flush=True)

    from cocotb_tools.runner import get_results

    runtime = TARGET / "runtime" / hashlib.sha256(f"{verilator} {coverage} {waves}".encode()).hexdigest()[:8]
    runner = _runner(runtime)
    # Everything that a reset does not set starts random, so that nothing relies on it.
    arguments = ["--assert", "--x-initial", "unique", "--x-assign", "unique", "-Wno-fatal", "-Wno-lint", "-Wno-style", *LIBRARY]
    try:
        build.mkdir(parents=True, exist_ok=True)
        runner.build(
            sources=files, hdl_toplevel=module, parameters=parameters, defines=defines, build_dir=build, waves=waves,
            timescale=("1ns", "1ns"), build_args=arguments + (["--coverage-line", "--coverage-toggle"] if coverage else []),
            always=True, log_file=build / "build.log",
        )
    except subprocess.CalledProcessError:
        sys.exit(f"hw: {label}: {verilator} cannot build it:\n{(build / 'build.log').read_text()[-4000:]}")
    _copy_objects(build, runtime)
    results = build / "results.xml"
    results.unlink(missing_ok=True)
    try:
        runner.test(
            test_module=tests, hdl_toplevel=module, hdl_toplevel_lang="verilog", build_dir=build, seed=seed, waves=waves,
            test_filter=os.environ.get("MILLRACE_TEST"), results_xml=str(results), log_file=build / "test.log",
            test_args=["+verilator+rand+reset+2", f"+verilator+seed+{seed % 2**31 or 1}"]
            + ([f"+verilator+coverage+file+{build / 'coverage.dat'}"] if coverage else []),
        )
        ran, failed = get_results(results)
    except (subprocess.CalledProcessError, RuntimeError, FileNotFoundError) as error:
        print((build / "test.log").read_text()[-20000:])
        sys.exit(f"hw: {label}: the simulation broke off (seed {seed}): {error}")
    if failed or not ran:
        print((build / "test.log").read_text()[-20000:])
        sys.exit(f"hw: {label}: {failed} of {ran} tests failed; again with MILLRACE_SEED={seed}")
    print(f"hw: {label}: {ran} passed", flush=True)


def _first(module):
    first = module not in _built
    _built.add(module)
    return first


def _runner(runtime):
    """cocotb's runner, which takes Verilator's own runtime, the same for all modules, from where the first build left it."""
    from cocotb_tools.runner import Verilator

    class Runner(Verilator):
        def _build_command(self):
            verilate, make = super()._build_command()
            verilate = [_main(part, runtime) if part.endswith("verilator.cpp") else part for part in verilate]
            # Between the two, because the objects must be newer than the makefile.
            return [verilate, [sys.executable, __file__, str(runtime), str(self.build_dir)], make]

    return Runner()


def _main(original, folder):
    """cocotb's main program, in which nothing is asserted at time 0: clocks start random in each module and differ, which is an edge without
    a reset."""
    text = Path(original).read_text()
    for where, what in (("Verilated::fatalOnVpiError(false);", "Verilated::assertOn(false);"), ("// Call registered NextSimTime", "Verilated::assertOn(true);\n        ")):
        if text.count(where) != 1:
            sys.exit(f"hw: {original} is not as harness.py knows it: {where!r} is not there")
        text = text.replace(where, what + where)
    copy = folder / "main.cpp"   # a path in which make sees no assignment
    if not copy.exists() or copy.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"main.cpp.{os.getpid()}"
        part.write_text(text)
        part.rename(copy)
    return str(copy)


def _copy_objects(source, to):
    to.mkdir(parents=True, exist_ok=True)
    for file in source.glob("verilated*.[od]"):
        if not (to / file.name).exists() or to.parent != TARGET / "runtime":
            part = to / f"{file.name}.{os.getpid()}"
            shutil.copyfile(file, part)
            part.rename(to / file.name)


def lint(module, files, parameters=None, defines=None):
    """Verilator's warnings, all of them, as errors."""
    command = [_verilator(), "--lint-only", "-Wall", "--assert", "--timing", "--top-module", module]
    command += LIBRARY
    command += [f"-G{name}={value}" for name, value in (parameters or {}).items()]
    command += [f"-D{name}={value}" for name, value in (defines or {}).items()]
    done = subprocess.run(command + [str(file) for file in files], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"hw: {module}: verilator --lint-only -Wall:\n{done.stderr}{done.stdout}")


def _file(name):
    path = Path(name)
    if path.suffix:
        return path if path.is_absolute() else HARDWARE / path
    for folder in (RTL, RTL / "generated"):
        if (folder / f"{name}.sv").exists():
            return folder / f"{name}.sv"
    sys.exit(f"hw: there is no {name}.sv in {RTL}")


def _configuration(label, coverage, waves):
    short = re.sub(r"[^A-Za-z0-9=]+", ",", label.partition(" ")[2]) or "default"
    if len(short) > 60:
        short = hashlib.sha256(short.encode()).hexdigest()[:12]
    return short + (",coverage" if coverage else "") + (",waves" if waves else "")


def _verilator():
    """Verilator of this Python's environment, else the system's; sets up what its Makefiles ask for."""
    try:
        import verilator
    except ImportError:
        found = shutil.which("verilator")
        if not found:
            sys.exit("hw: there is no verilator. Run scripts/hw-tools and use target/hw-tools/bin/python.")
        return found
    root = Path(verilator.__file__).resolve().parent
    os.environ["VERILATOR_ROOT"] = str(root)
    if os.environ["PATH"].split(os.pathsep)[0] != str(root / "bin"):
        os.environ["PATH"] = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ["MAKEFLAGS"] = " -- " + " ".join(f"{name}={value.replace(' ', chr(92) + ' ')}" for name, value in MAKE_SETTINGS.items())
    return str(root / "bin" / "verilator")


if __name__ == "__main__":
    _copy_objects(Path(sys.argv[1]), Path(sys.argv[2]))
