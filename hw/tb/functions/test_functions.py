"""hw/rtl/generated/fn_*.sv against the functions that they were made from (crates/functions), by random arguments.

    millrace-translate vectors NAME ──arguments, results──► tb_NAME: fn_NAME gives the same?

The arguments are made beside the results by the native function; their seed is printed. Testbenches are generated with the ports' names.
All are in one program, because what takes time is to build it; `+function=NAME` chooses one.

    MILLRACE_SEED, MILLRACE_QUICK    as in harness.py; quick: fewer vectors
    MILLRACE_TEST                    only functions whose name matches
"""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness

QUICK = os.environ.get("MILLRACE_QUICK") == "1"
VECTORS = 20_000 if QUICK else 300_000
REPOSITORY = harness.HARDWARE.parent
TRANSLATE = ["cargo", "run", "--quiet", "--profile", "checked", "--locked", "-p", "millrace-translate", "--"]


def translate(*arguments):
    done = subprocess.run([*TRANSLATE, *arguments], cwd=REPOSITORY)
    if done.returncode:
        sys.exit(f"hw: functions: {' '.join(arguments)}: the translator failed, see above")


def build(folder, modules):
    folder.mkdir(parents=True, exist_ok=True)
    translate("testbench", str(folder))
    for module in modules:
        harness.lint(module.stem, [module])
    command = [harness._verilator(), "--binary", "--timing", "--assert", "-O3", "--x-assign", "unique", "--x-initial", "unique"]
    command += ["-Wno-fatal", "-Wno-lint", "-Wno-style", "--timescale", "1ns/1ns", "-j", str(os.cpu_count())]
    command += ["--top-module", "tb_functions", "-Mdir", str(folder / "build"), *map(str, modules), *map(str, sorted(folder.glob("tb_*.sv")))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"hw: functions: Verilator cannot build the testbenches:\n{(done.stdout + done.stderr)[-4000:]}")
    return folder / "build" / "Vtb_functions"


def compare(program, name, seed):
    vectors = subprocess.Popen([*TRANSLATE, "vectors", name, str(VECTORS), str(seed)], cwd=REPOSITORY, stdout=subprocess.PIPE)
    settings = [f"+function={name}", "+verilator+rand+reset+2", f"+verilator+seed+{seed % 2**31 or 1}"]
    done = subprocess.run([str(program), *settings], stdin=vectors.stdout, capture_output=True, text=True)
    vectors.stdout.close()
    vectors.wait()
    if done.returncode or f"{name}: {VECTORS} vectors are the same" not in done.stdout:
        sys.exit(f"hw: functions: fn_{name} differs; again with MILLRACE_SEED={seed} MILLRACE_TEST={name}\n{(done.stdout + done.stderr)[-2000:]}")
    print(f"hw: functions: {name}: {VECTORS} vectors are the same", flush=True)


def test_functions():
    seed = int(os.environ.get("MILLRACE_SEED") or random.SystemRandom().getrandbits(31))
    print(f"hw: functions: MILLRACE_SEED={seed}", flush=True)
    modules = sorted((harness.RTL / "generated").glob("fn_*.sv"))
    program = build(harness.TARGET / "functions", modules)
    names = [module.stem.removeprefix("fn_") for module in modules]
    names = [name for name in names if re.search(os.environ.get("MILLRACE_TEST") or "", name)]
    for name in names:
        compare(program, name, seed)
    print(f"hw: functions: {len(names)} passed")


if __name__ == "__main__":
    test_functions()
