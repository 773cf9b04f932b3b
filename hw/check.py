"""Checks the hardware: what scripts/hw-test runs in the tools' Python.

    check.py [--quick] [--results FILE] [WORD...]

    lint      each module of hw/rtl as the top: Verilator's warnings, all of them, are errors
    tests     hw/tb/*/test_*.py: cocotb, each in its own process
    proofs    hw/formal/*.sv: assertions proved by induction (hw/formal/prove.py)

With --quick, module tests run in their first configuration only, and with a seed that is always the same, because `make test` is to be
repeatable; else with a new one for each run, which the first line says. MILLRACE_SEED chooses another. With words, only what has one of them in its name. A line per
check, the whole output of those that fail; the last line adds up. FILE gets the numbers for scripts/test.
"""

import argparse
import concurrent.futures
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

HARDWARE = Path(__file__).resolve().parent
sys.path.insert(0, str(HARDWARE / "tb"))

import harness


def lint(file):
    harness.lint(file.stem, [harness.RTL / "millrace_pkg.sv", file], {})


def checks(quick):
    """Name and command of everything there is, the longest first."""
    python = sys.executable
    for test in sorted(HARDWARE.glob("tb/*/test_*.py")):
        yield f"test {test.stem.removeprefix('test_')}", [python, str(test)]
    for proof in sorted(HARDWARE.glob("formal/*.sv")):
        yield f"proof {proof.stem}", [python, str(HARDWARE / "formal" / "prove.py"), str(proof)]
    for file in sorted(HARDWARE.glob("rtl/**/*.sv")):
        if file.name != "millrace_pkg.sv":
            yield f"lint {file.stem}", [python, __file__, "--lint", str(file)]


def carry_out(command, quick, seed):
    start = time.monotonic()
    environment = {**os.environ, "MILLRACE_QUICK": str(int(quick)), "MILLRACE_SEED": seed}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


def count(code, output):
    """Passed and failed. A module's test file counts its cases; whatever else is one."""
    passed = sum(map(int, re.findall(r"^hw: .*: (\d+) passed$", output, re.M)))
    failed = sum(map(int, re.findall(r"^hw: .*: (\d+) of \d+ tests failed", output, re.M)))
    if code:
        return passed, max(failed, 1)
    return max(passed, 1), 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--lint", type=Path)
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    if arguments.lint:
        lint(arguments.lint)
        return 0
    wanted = [check for check in checks(arguments.quick) if not arguments.words or any(word in check[0] for word in arguments.words)]
    if not wanted:
        sys.exit(f"hw: nothing is called {' or '.join(arguments.words)}")
    seed = os.environ.get("MILLRACE_SEED") or ("1" if arguments.quick else str(random.SystemRandom().getrandbits(31)))
    print(f"hw: MILLRACE_SEED={seed}", flush=True)
    passed = failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(carry_out, command, arguments.quick, seed): name for name, command in wanted}
        for done in concurrent.futures.as_completed(running):
            code, output, seconds = done.result()
            good, bad = count(code, output)
            passed, failed = passed + good, failed + bad
            if bad:
                print(output if len(output) < 20000 else f"{output[:4000]}\n[...]\n{output[-16000:]}")
            if bad or not running[done].startswith("lint"):
                print(f"hw: {running[done]}: {good} passed, {bad} failed ({seconds:.0f} s)", flush=True)
    if arguments.results:
        arguments.results.write_text(f"{passed} {failed}\n")
    print(f"hardware: {passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
