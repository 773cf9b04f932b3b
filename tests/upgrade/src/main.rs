//! The program `millrace` with the next version of its layouts: what upgrades are tested with (docs/adr/0010-upgrade.md).

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    millrace_frontends::nvme::use_next_layouts();
    millrace_command::main()
}
