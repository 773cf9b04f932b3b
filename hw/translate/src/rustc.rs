//! rustc's LLVM IR of the functions.

use std::{fs, io, path::Path, process::Command};

/// How it is compiled: everything inlined and unrolled, nothing in vectors, names and lines kept.
const OPTIONS: &[&str] = &[
    "--edition=2024",
    "--crate-type=lib",
    "--crate-name=millrace_functions",
    "--emit=llvm-ir",
    "-Copt-level=3",
    "-Cpanic=abort",
    "-Cdebuginfo=2",
    "-Ccodegen-units=1",
    "-Cno-vectorize-loops",
    "-Cno-vectorize-slp",
    "-Coverflow-checks=off",
    "-Cdebug-assertions=off",
];

/// Where the functions are, in the repository.
pub const FUNCTIONS: &str = "crates/functions/src/lib.rs";

/// The IR of a crate, and the version of rustc that made it.
///
/// # Errors
/// When rustc cannot be run, or refuses the functions.
pub fn llvm_ir(repository: &Path, source: &str, scratch: &Path) -> io::Result<(String, String)> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = scratch.join("functions.ll");
    let mut command = Command::new(&rustc);
    command.current_dir(repository).args(OPTIONS).arg("-o").arg(&output).arg(source);
    let run = command.output().map_err(|why| io::Error::other(format!("{} cannot be run: {why}", rustc.display())))?;
    if !run.status.success() {
        return Err(io::Error::other(format!("rustc refuses {source}:\n{}", String::from_utf8_lossy(&run.stderr))));
    }
    let version = Command::new(&rustc).arg("--version").output()?;
    Ok((fs::read_to_string(output)?, String::from_utf8_lossy(&version.stdout).trim().to_owned()))
}
