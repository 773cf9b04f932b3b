"""Adds up what the module tests covered: `scripts/hw-test --coverage` runs them so that they count, then this. With --write the table goes into
docs/hardware/coverage.md, too.

    target/hw/tb/<module>/<configuration>,coverage/coverage.dat ──► a line per file: branches taken, signals that rose and fell

A branch or signal counts as covered if any test of any configuration covered it, in whatever module the file was a part of. The branches
that none took are listed.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tb"))
sys.dont_write_bytecode = True

import harness

PAGE = harness.HARDWARE.parent / "docs" / "hardware" / "coverage.md"
BEGIN, END = "<!-- made by scripts/hw-test --coverage: begin -->\n", "<!-- made by scripts/hw-test --coverage: end -->\n"
POINT = re.compile(r"^C '(.*)' (\d+)$")


def points(files):
    """Kind, file, line, what: how often, over all files."""
    found = defaultdict(int)
    for file in files:
        for line in file.read_text(errors="replace").splitlines():
            point = POINT.match(line)
            if not point:
                continue
            fields = dict(part.split("\x02", 1) for part in point[1].split("\x01") if part)
            kind = "toggle" if fields["t"] == "toggle" else "branch"
            found[kind, Path(fields["f"]).name, int(fields["l"]), fields.get("o", ""), fields.get("n", "")] += int(point[2])
    return found


def main():
    files = sorted(harness.TARGET.glob("*/*,coverage/coverage.dat"))
    if not files:
        sys.exit("hw: no test has counted coverage: run scripts/hw-test --coverage")
    total, covered, missed = defaultdict(int), defaultdict(int), defaultdict(set)
    for (kind, file, line, what, _), count in points(files).items():
        if file.endswith("_pkg.sv"):
            continue
        total[kind, file] += 1
        covered[kind, file] += count > 0
        if kind == "branch" and not count:
            missed[file].add(line)

    def share(kind, names):
        whole = sum(total[kind, name] for name in names)
        return f"{100 * sum(covered[kind, name] for name in names) / whole:.1f} %" if whole else "–"

    names = sorted({file for _, file in total})
    lines = ["| file | branches | toggles | branches that no test took (lines) |", "| --- | ---: | ---: | --- |"]
    for name in names:
        lines.append(f"| {name} | {share('branch', [name])} | {share('toggle', [name])} | {', '.join(map(str, sorted(missed[name])))} |")
    lines.append(f"| **all** | {share('branch', names)} | {share('toggle', names)} | |")
    table = "\n".join(lines) + "\n"
    print(table, end="")
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text()
        begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        PAGE.write_text(text[:begin] + table + text[end:])


if __name__ == "__main__":
    main()
