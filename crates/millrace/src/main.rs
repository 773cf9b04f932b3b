//! The program `millrace`; what it does is the library's, so that tests have programs that differ from it in one thing.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    millrace_command::main()
}
